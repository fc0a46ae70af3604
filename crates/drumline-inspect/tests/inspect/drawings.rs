//! The drawings in docs/schedules are what the code draws today.

use std::collections::BTreeMap;
use std::fs;

#[path = "../../examples/draw/gallery.rs"]
mod gallery;

#[test]
fn committed_drawings_are_up_to_date() {
    let committed: BTreeMap<String, String> = fs::read_dir(gallery::folder())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
        .filter(|(name, _)| name != "README.md")
        .map(|(name, path)| (name, fs::read_to_string(path).unwrap()))
        .collect();
    let drawn = gallery::files().unwrap();

    let differing: Vec<&String> = committed
        .keys()
        .chain(drawn.keys())
        .filter(|&name| committed.get(name) != drawn.get(name))
        .collect();
    assert!(
        differing.is_empty(),
        "out of date: {differing:?}\nrun: cargo run -p drumline-inspect --example draw"
    );
}
