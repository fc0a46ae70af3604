"""Names that other libraries have for what drumline does."""
