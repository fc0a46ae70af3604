//! Adapter for burn.
