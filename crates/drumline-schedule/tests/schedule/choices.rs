use std::fmt::Write;

use drumline_schedule::price::ElementKind;
use drumline_schedule::step::Step;
use drumline_schedule::{
    ALGORITHMS, Chooser, Collective, MemoryUse, Situation, SumOrder, Topology, Why, eligible,
};

const F32: ElementKind = ElementKind { bytes: 4, sum_bytes: 4 };
const BF16: ElementKind = ElementKind { bytes: 2, sum_bytes: 4 };

fn worlds() -> [(&'static str, Topology); 12] {
    let nodes = Topology::hosts(&[8]).with_nodes((0..8).map(|rank| Some(rank / 4)));
    let by_placement = Topology::hosts(&[3, 3]).with_order(SumOrder::Placement);
    [
        ("alone", Topology::flat(1)),
        ("8 hosts of 1", Topology::flat(8)),
        ("300 hosts of 1", Topology::flat(300)),
        ("1 host of 2", Topology::hosts(&[2])),
        ("1 host of 8", Topology::hosts(&[8])),
        ("1 host of 2 nodes of 4", nodes),
        ("2 hosts of 2", Topology::hosts(&[2, 2])),
        ("2 hosts of 3", Topology::hosts(&[3, 3])),
        ("2 hosts of 3, by placement", by_placement),
        ("64 hosts of 8", Topology::hosts(&[8; 64])),
        ("300 hosts of 2", Topology::hosts(&[2; 300])),
        ("2048 hosts of 8", Topology::hosts(&[8; 2048])),
    ]
}

const MEMORIES: [(&str, Option<usize>, bool); 3] =
    [("links", None, false), ("staged", Some(1 << 20), false), ("registered", Some(1 << 20), true)];

/// The algorithm for every length, as `from:name`.
fn choices(situation: Situation<'_>) -> String {
    let (mut text, mut last, mut chooser) = (String::new(), "", Chooser::default());
    for elements in (0..27).flat_map(|log2| [1 << log2, (1 << log2) + 1]) {
        let chosen = chooser.choose(&Situation { elements, ..situation });
        let name = chosen.map_or("none", |row| row.name);
        if name != last {
            write!(text, " {elements}:{name}").unwrap();
            last = name;
        }
    }
    text
}

/// The code before the table said of each row where it serves wrote `choices.txt`. A memory without a line
/// chooses like the memory of the line before.
#[test]
fn choices_are_those_that_were_recorded() {
    let mut found = String::new();
    for (name, topology) in &worlds() {
        for collective in Collective::ALL {
            for (width, kind) in [("f32", F32), ("bf16", BF16)] {
                // A barrier has no blocks.
                for uneven in
                    [false, true].into_iter().filter(|it| !(*it && collective.is_barrier()))
                {
                    let mut before = String::new();
                    for (memory, long_bytes, registered) in MEMORIES {
                        let over_links = Situation::over_links(collective, topology, 0, kind);
                        let situation = Situation { uneven, registered, long_bytes, ..over_links };
                        let text = choices(situation);
                        if text != before {
                            let blocks = if uneven { " uneven" } else { "" };
                            writeln!(found, "{name}; {collective} {width}{blocks} {memory}:{text}")
                                .unwrap();
                            before = text;
                        }
                    }
                }
            }
        }
    }
    for (found, recorded) in found.lines().zip(include_str!("choices.txt").lines()) {
        assert_eq!(found, recorded);
    }
    assert_eq!(found, include_str!("choices.txt"));
}

#[test]
fn every_choice_is_eligible() {
    for (_, topology) in &worlds() {
        for collective in Collective::ALL {
            for ((_, long_bytes, registered), kind) in
                MEMORIES.into_iter().flat_map(|memory| [(memory, F32), (memory, BF16)])
            {
                for (elements, uneven) in [(1, false), (1 << 22, false), (1 << 22, true)] {
                    let over_links = Situation::over_links(collective, topology, elements, kind);
                    let situation = Situation { uneven, registered, long_bytes, ..over_links };
                    let is_eligible = |name| {
                        let mut rows = ALGORITHMS.iter().filter(|row| row.name == name);
                        rows.any(|row| eligible(row, &situation).is_ok())
                    };
                    let chosen = Chooser::default().choose(&situation);
                    assert!(chosen.is_none_or(|row| is_eligible(row.name)), "{situation:?}");
                    let any = ALGORITHMS.iter().any(|row| eligible(row, &situation).is_ok());
                    assert_eq!(chosen.is_some(), any, "{situation:?}");
                }
            }
        }
    }
}

#[test]
fn narrow_floats_are_summed_in_place_where_their_sums_lie_apart() {
    let hosts = Topology::hosts(&[2, 2]);
    let nodes = Topology::hosts(&[4]).with_nodes((0..4).map(|rank| Some(rank / 2)));
    for (world, expected) in [(&hosts, Ok(())), (&nodes, Err(Why::WouldRound))] {
        let over_links = Situation::over_links(Collective::AllReduce, world, 1_000, BF16);
        let situation = Situation { registered: true, long_bytes: Some(1 << 20), ..over_links };
        let in_place = ALGORITHMS.iter().filter(|row| {
            row.partial_sums_travel
                && row.memory == MemoryUse::Registered
                && eligible(row, &over_links) == Err(Why::NoSharedMemory)
                && row.name.starts_with("shm") == world.is_one_host()
        });
        let verdicts: Vec<_> = in_place.map(|row| eligible(row, &situation)).collect();
        assert!(!verdicts.is_empty() && verdicts.iter().all(|it| *it == expected), "{verdicts:?}");
    }
}

/// So that every rank can name every missing one.
#[test]
fn in_a_monitored_barrier_every_rank_hears_from_every_rank() {
    let world = Topology::hosts(&[5]);
    let rows = ALGORITHMS.iter().filter(|row| row.collective == Collective::MonitoredBarrier);
    for schedule in rows.flat_map(|row| row.schedules(&world, 0).unwrap()) {
        let hears = schedule.steps.iter().filter_map(|step| match step {
            Step::Recv { from: peer, .. } | Step::Wait { peer, .. } => Some(*peer),
            _ => None,
        });
        let mut heard: Vec<usize> = hears.collect();
        heard.sort_unstable();
        assert!(heard.into_iter().eq((0..5).filter(|rank| *rank != schedule.rank)), "{schedule}");
    }
}
