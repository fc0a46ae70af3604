//! A picture of bus bandwidth over size, as SVG.

use std::collections::BTreeMap;

use super::row::Row;
use crate::{
    Result,
    svg::{Panel, page, size_name},
};

/// Draws a curve for every case over its sizes. Both axes are logarithmic: bytes across, GB/s upwards.
pub(super) fn svg(title: String, rows: &[Row]) -> Result<String> {
    let mut curves: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        curves.entry(name(row)).or_default().push((row.bytes as f64, row.busbw()));
    }
    page(vec![Panel {
        title,
        x_title: "size, bytes",
        x_name: size_name,
        y_title: "bus bandwidth, GB/s",
        curves: curves.into_iter().collect(),
    }])
}

/// The name of a row's curve. Rows of one name are one curve.
fn name(row: &Row) -> String {
    let op = row.op.map(|op| format!(" {op}")).unwrap_or_default();
    format!("{}{op} {} {} {}", row.operation, row.dtype, row.way(), row.place)
}

#[cfg(test)]
mod tests {
    use super::{super::row::tests::row, *};

    #[test]
    fn a_picture_has_a_curve_for_each_way() {
        let mut rows = vec![row(8, &[&[0.25]]), row(1 << 20, &[&[50.0]])];
        rows.push(Row { transport: "tcp".to_owned(), ..row(1 << 20, &[&[400.0]]) });
        let picture = svg("speed of <this>".to_owned(), &rows).unwrap();
        for text in ["speed of &lt;this&gt;", "shm/staged in", "tcp in", "1 MiB", "bandwidth, GB/s"]
        {
            assert!(picture.contains(text), "{text}: {picture}");
        }
        let places = |name: &str| -> Vec<i32> {
            let start = format!(" {name}=\"");
            let found = picture.split(&start).skip(1);
            found.map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect()
        };
        let [x8, x1m, x1m_tcp] = places("cx")[..] else { panic!("{picture}") };
        let [y8, y1m, y1m_tcp] = places("cy")[..] else { panic!("{picture}") };
        assert!(x8 < x1m && x1m == x1m_tcp, "larger is further right: {picture}");
        assert!(y1m < y1m_tcp && y1m_tcp < y8, "faster is higher: {picture}");
    }

    #[test]
    fn nothing_to_draw_is_drawn() {
        assert!(svg("nothing".to_owned(), &[]).unwrap().ends_with("</svg>\n"));
    }
}
