//! The launcher library.
