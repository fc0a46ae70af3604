//! Example.

fn main() {}
