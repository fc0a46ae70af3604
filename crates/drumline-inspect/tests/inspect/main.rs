//! Checks and drawings of the algorithms of the table.
#![allow(clippy::unwrap_used, clippy::panic)]

mod algorithms;
mod drawings;
mod faults;
mod hosts;
mod many_hosts;
mod races;

/// The numbers of ranks or hosts that are tried: all for `make nightly`, else the small ones and some around powers of
/// two, where the shapes of trees change. The time of a check grows with the cube of the number.
fn sizes(all: impl IntoIterator<Item = usize>) -> impl Iterator<Item = usize> {
    const LARGE: [usize; 5] = [31, 32, 33, 64, 129];
    let is_tried = |size: &usize| cfg!(feature = "nightly") || *size <= 17 || LARGE.contains(size);
    all.into_iter().filter(is_tried)
}

/// What is tried of these in a world of so many ranks: all for `make nightly` or in a small world, else the last.
fn tried(world_size: usize, all: Vec<usize>) -> Vec<usize> {
    let first = if cfg!(feature = "nightly") || world_size <= 17 { 0 } else { all.len() - 1 };
    all[first..].to_vec()
}
