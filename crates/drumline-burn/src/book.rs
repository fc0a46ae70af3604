//! Runs the Rust of those pages of the book that train with burn.

#[doc = include_str!("../../../docs/start/rust.md")]
struct Start;

#[doc = include_str!("../../../docs/guides/uneven-inputs.md")]
struct UnevenInputs;
