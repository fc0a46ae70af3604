//! The legend of a drawing.

use drumline_schedule::step::{Buffer, Loc, Span};

use super::events::{Event, Kind};
use super::marks::{arrow, combine_mark, copy_mark, diamond, reach};
use crate::walk::Combine;

/// Explains the signs that the drawing uses, from row `y` on. Returns the last row, in pixels.
pub(super) fn legend(mut y: usize, width: usize, events: &[Event], svg: &mut Vec<String>) -> usize {
    let data = Loc::data(Span::WHOLE);
    let scratch = Loc::scratch(0, Span::WHOLE);
    let uses = |sign: &dyn Fn(&Kind) -> bool| events.iter().any(|event| sign(&event.kind));
    let mut x = 24;
    let mut entry = |used: bool, text: &str, draw: &dyn Fn(usize, usize, &mut Vec<String>)| {
        if used {
            if x + 64 + 7 * text.len() > width {
                (x, y) = (24, y + 28);
            }
            draw(x, y, svg);
            svg.push(format!(r#"<text x="{}" y="{}">{text}</text>"#, x + 40, y + 4));
            x += 64 + 7 * text.len();
        }
    };
    let stored = |kind: &Kind, in_scratch: bool| match kind {
        Kind::Message { dst, combine: None, .. } => {
            matches!(dst.buffer, Buffer::Scratch(_) | Buffer::Sum(_)) == in_scratch
        }
        _ => false,
    };
    let combined = |kind: &Kind, finished: bool| match kind {
        Kind::Message { combine: Some(Combine { finish, .. }), .. }
        | Kind::Combine { finish, .. } => *finish == finished,
        _ => false,
    };
    let of_messages = match events.iter().any(|event| carries_elements(&event.kind)) {
        true => "to data",
        false => "empty message",
    };
    entry(uses(&|kind| stored(kind, false)), of_messages, &|x, y, svg| {
        arrow(x, x + 30, y, String::new(), data, None, svg);
    });
    entry(uses(&|kind| stored(kind, true)), "to scratch", &|x, y, svg| {
        arrow(x, x + 30, y, String::new(), scratch, None, svg);
    });
    entry(uses(&|kind| combined(kind, false)), "combine", &|x, y, svg| {
        combine_mark(x + 18, y, false, svg);
    });
    entry(uses(&|kind| combined(kind, true)), "complete the sum", &|x, y, svg| {
        combine_mark(x + 18, y, true, svg);
    });
    entry(uses(&|kind| matches!(kind, Kind::Copy { .. })), "copy", &|x, y, svg| {
        copy_mark(x + 18, y, svg);
    });
    entry(uses(&|kind| matches!(kind, Kind::Post { .. })), "post", &|x, y, svg| {
        diamond("post", x + 18, y, svg);
    });
    entry(uses(&|kind| matches!(kind, Kind::Wait { .. })), "wait", &|x, y, svg| {
        diamond("wait", x + 18, y, svg);
    });
    let reads = |kind: &Kind| matches!(kind, Kind::Combine { reads, .. } if !reads.is_empty());
    entry(uses(&reads), "read at a peer", &|x, y, svg| {
        svg.push(format!(r#"<path class="reach" d="M{x} {y}H{}"/>"#, x + 30));
        svg.push(format!(r#"<circle class="read" cx="{x}" cy="{y}" r="3.5"/>"#));
    });
    let writes = |kind: &Kind| matches!(kind, Kind::Combine { writes, .. } if !writes.is_empty());
    entry(uses(&writes), "write there", &|x, y, svg| {
        svg.push(format!(r#"<path class="reach" d="M{x} {y}H{}"/>"#, x + 30));
        svg.push(format!(r#"<circle class="ring" cx="{}" cy="{y}" r="7"/>"#, x + 23));
    });
    entry(uses(&|kind| matches!(kind, Kind::Reach { .. })), "copy at a peer", &|x, y, svg| {
        reach(x, x + 30, y, String::new(), svg);
    });
    y
}

fn carries_elements(kind: &Kind) -> bool {
    matches!(kind, Kind::Message { src, .. } if src.span.count > 0)
}
