//! What is counted of calls, as text for Prometheus.

use drumline_group::{GroupOptions, ProcessGroup, ReduceOp, metrics};

use crate::common::{everywhere, world_with};

/// The value of a metric.
fn value(text: &str, name: &str, labels: &str) -> Option<f64> {
    let start = format!("{name}{{{labels}}} ");
    text.lines().find_map(|line| line.strip_prefix(&start)).map(|value| value.parse().unwrap())
}

#[test]
fn calls_bytes_and_time_are_counted_by_operation() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let rank = group.rank();
            for _ in 0..100 {
                group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum).unwrap();
            }
            let long = vec![1_u8; 1 << 20];
            let work = group.all_reduce_async(long, ReduceOp::Max).unwrap();
            if rank == 0 {
                group.send(&[1_u8; 5], 1, 0).unwrap();
            } else {
                group.recv(&mut [0_u8; 5], 0, 0).unwrap();
            }
            work.wait().unwrap();
            let text = metrics::text([&group]);
            let of = |name, operation| {
                let name = format!("drumline_{name}_total");
                let group = group.name();
                let labels = format!("group=\"{group}\",rank=\"{rank}\",operation=\"{operation}\"");
                value(&text, &name, &labels)
            };
            assert_eq!(of("calls", "all_reduce"), Some(101.0), "{text}");
            assert_eq!(of("bytes", "all_reduce"), Some(4000.0 + f64::from(1 << 20)), "{text}");
            let seconds = of("seconds", "all_reduce").unwrap();
            assert_eq!(seconds, metrics::communication_time(&group).as_secs_f64());
            assert!(seconds > 0.0);
            let (mine, other) = if rank == 0 { ("send", "recv") } else { ("recv", "send") };
            assert_eq!((of("calls", mine), of("bytes", mine)), (Some(1.0), Some(5.0)), "{text}");
            assert_eq!(of("calls", other), None, "{text}");
            group.destroy().unwrap();
        });
    });
}

#[test]
fn a_failure_shows_and_several_groups_are_one_text() {
    world_with(2, &Default::default(), |group| {
        let pair = group.new_group(&[0, 1], &GroupOptions::default()).unwrap();
        group.barrier().unwrap();
        let mut wrong = vec![0_u8; 1 + pair.rank()];
        pair.all_reduce(&mut wrong, ReduceOp::Sum).unwrap_err();
        let text = metrics::text([&group, &pair]);
        let rank = group.rank();
        let failed = |group: &ProcessGroup| {
            let labels = format!("group=\"{}\",rank=\"{rank}\"", group.name());
            value(&text, "drumline_group_failed", &labels)
        };
        assert_eq!((failed(&group), failed(&pair)), (Some(0.0), Some(1.0)), "{text}");
        // The format has one such line for each metric, before its values.
        for metric in ["calls_total", "bytes_total", "seconds_total", "group_failed"] {
            let marks = text.matches(&format!("# TYPE drumline_{metric} ")).count();
            assert_eq!(marks, 1, "{text}");
        }
        group.destroy().unwrap();
    });
}
