//! The drawings in docs/schedules are what the code draws today.

use std::fs;

#[path = "../../examples/draw/gallery.rs"]
mod gallery;

/// Those that the page shows in the repository. `make schedules` draws the others.
const COMMITTED: [&str; 6] = [
    "all_gather-bruck-p5.svg",
    "all_reduce-doubling-p4.svg",
    "all_reduce-halving-p5.svg",
    "all_reduce-hierarchical-p5.svg",
    "all_reduce-shm-twoshot-p4.svg",
    "broadcast-binomial-p5.svg",
];

#[test]
fn committed_drawings_are_up_to_date() {
    let drawn = gallery::files().unwrap();
    let page = fs::read_to_string(gallery::folder().join("README.md")).unwrap();
    for name in COMMITTED {
        let committed = fs::read_to_string(gallery::folder().join(name)).unwrap();
        let is_same = drawn.get(name) == Some(&committed);
        assert!(is_same, "{name} is out of date: make schedules");
        assert!(page.contains(&format!("]({name})")), "docs/schedules/README.md shows no {name}");
    }
    assert_eq!(page.matches(".svg)").count(), COMMITTED.len());
}
