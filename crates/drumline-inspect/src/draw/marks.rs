//! The signs of a drawing, each at a place.

use drumline_schedule::step::{Buffer, Loc};

use super::events::hull;
use crate::walk::Combine;

/// Pixels between two lanes.
pub(super) const LANE: usize = 130;

pub(super) fn arrow(
    from: usize,
    to: usize,
    y: usize,
    label: String,
    dst: Loc,
    combine: Option<Combine>,
    svg: &mut Vec<String>,
) {
    let (from, to, y) = (from as f64, to as f64, y as f64);
    let forward = if to > from { 1.0 } else { -1.0 };
    let tip = to - forward * if combine.is_some() { 9.0 } else { 2.0 };
    let base = tip - forward * 10.0;
    let head = if let Buffer::Scratch(_) | Buffer::Sum(_) = dst.buffer { "hollow" } else { "tip" };
    svg.push(format!(r#"<path class="wire" d="M{from} {y}H{base}"/>"#));
    svg.push(format!(r#"<circle class="dot" cx="{from}" cy="{y}" r="3.5"/>"#));
    svg.push(format!(r#"<path class="{head}" d="M{tip} {y}L{base} {}V{}Z"/>"#, y - 5.0, y + 5.0));
    if let Some(Combine { finish, .. }) = combine {
        combine_mark(to as usize, y as usize, finish, svg);
    }
    if !label.is_empty() {
        // In the gap beside the sender, where no lane crosses the text.
        let x = from + forward * LANE as f64 / 2.0;
        svg.push(format!(r#"<text class="span" x="{x}" y="{}">{label}</text>"#, y - 5.0));
    }
}

/// A line along all accesses of a step to the memory of neighbours.
pub(super) fn bus(own: usize, y: usize, reads: &[usize], writes: &[usize], svg: &mut Vec<String>) {
    let lanes: Vec<usize> = [own].iter().chain(reads).chain(writes).copied().collect();
    let ends = hull(&lanes);
    if ends.start() == ends.end() {
        return;
    }
    svg.push(format!(r#"<path class="reach" d="M{} {y}H{}"/>"#, ends.start(), ends.end()));
    for x in reads {
        svg.push(format!(r#"<circle class="read" cx="{x}" cy="{y}" r="3.5"/>"#));
    }
    for x in writes {
        svg.push(format!(r#"<circle class="ring" cx="{x}" cy="{y}" r="7"/>"#));
    }
}

/// A copy between the memories of two ranks.
pub(super) fn reach(from: usize, to: usize, y: usize, label: String, svg: &mut Vec<String>) {
    let (from, to, y) = (from as f64, to as f64, y as f64);
    let forward = if to > from { 1.0 } else { -1.0 };
    let tip = to - forward * 2.0;
    let base = tip - forward * 10.0;
    svg.push(format!(r#"<path class="reach" d="M{from} {y}H{base}"/>"#));
    svg.push(format!(r#"<circle class="read" cx="{from}" cy="{y}" r="3.5"/>"#));
    svg.push(format!(r#"<path class="written" d="M{tip} {y}L{base} {}V{}Z"/>"#, y - 5.0, y + 5.0));
    if !label.is_empty() {
        let x = from + forward * LANE as f64 / 2.0;
        svg.push(format!(r#"<text class="span" x="{x}" y="{}">{label}</text>"#, y - 5.0));
    }
}

pub(super) fn diamond(class: &str, x: usize, y: usize, svg: &mut Vec<String>) {
    svg.push(format!(
        r#"<path class="{class}" d="M{} {y}L{x} {}L{} {y}L{x} {}Z"/>"#,
        x - 7,
        y - 7,
        x + 7,
        y + 7
    ));
}

pub(super) fn combine_mark(x: usize, y: usize, finish: bool, svg: &mut Vec<String>) {
    let (circle, plus) = if finish { ("finish", "finish-plus") } else { ("mark", "plus") };
    svg.push(format!(r#"<circle class="{circle}" cx="{x}" cy="{y}" r="8"/>"#));
    svg.push(format!(
        r#"<path class="{plus}" d="M{} {y}H{}M{x} {}V{}"/>"#,
        x - 4,
        x + 4,
        y - 4,
        y + 4
    ));
}

pub(super) fn copy_mark(x: usize, y: usize, svg: &mut Vec<String>) {
    svg.push(format!(
        r#"<rect class="mark" x="{}" y="{}" width="12" height="12" rx="2"/>"#,
        x - 6,
        y - 6
    ));
}

pub(super) fn beside(x: usize, y: usize, label: String, svg: &mut Vec<String>) {
    if !label.is_empty() {
        // Centred, and clear of the mark.
        let (x, y) = (x + width_beside(&label) - label.len() * 7 / 2, y + 4);
        svg.push(format!(r#"<text class="span" x="{x}" y="{y}">{label}</text>"#));
    }
}

/// From the lane to the end of what stands beside it.
pub(super) fn width_beside(label: &str) -> usize {
    let half = label.len() * 7 / 2;
    36.max(12 + half) + half
}
