"""drumline in the place of haiscale."""
