//! Runs the Rust code of the book's page about candle.

#[doc = include_str!("../../../docs/start/candle.md")]
struct Start;
