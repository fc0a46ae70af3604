//! What docs/schedules holds.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use drumline_inspect::draw;
use drumline_schedule::{ALGORITHMS, Algorithm, MemoryUse, SumOrder, Topology};

/// A power of two, and a world size that is none.
const WORLD_SIZES: [usize; 2] = [4, 5];

/// For algorithms that serve neither: three hosts of two ranks.
const LARGER: [usize; 1] = [6];

/// Where the files belong.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schedules")
}

/// File names and contents.
pub(crate) fn files() -> Result<BTreeMap<String, String>, Box<dyn Error>> {
    let mut files = BTreeMap::new();
    for algorithm in ALGORITHMS {
        let Algorithm { collective, name, .. } = algorithm;
        let served = |sizes: &[usize]| -> Vec<(usize, Topology)> {
            let worlds = sizes.iter().map(|&size| (size, topology(algorithm, size)));
            worlds.filter(|(_, world)| (algorithm.applies)(world)).collect()
        };
        let mut worlds = served(&WORLD_SIZES);
        if worlds.is_empty() {
            worlds = served(&LARGER);
        }
        for (world_size, topology) in worlds {
            let schedules = algorithm.schedules(&topology, 0)?;
            let text: Vec<String> = schedules.iter().map(ToString::to_string).collect();
            let stem = format!("{collective}-{name}-p{world_size}");
            files.insert(format!("{stem}.svg"), draw::svg(&topology, &schedules)?);
            files.insert(format!("{stem}.txt"), text.join("\n"));
        }
    }
    Ok(files)
}

/// Hosts of two ranks where the algorithm knows what to do with them, else the simplest world that it
/// serves.
fn topology(algorithm: &Algorithm, world_size: usize) -> Topology {
    if algorithm.memory == MemoryUse::Private {
        return Topology::flat(world_size);
    }
    let pairs = Topology::placed((0..world_size).map(|rank| rank / 2));
    let one_host = Topology::hosts(&[world_size]);
    let two_hosts = Topology::hosts(&[world_size / 2, world_size.div_ceil(2)]);
    let two_hosts = two_hosts.with_order(SumOrder::Placement);
    let nodes = one_host.clone().with_nodes((0..world_size).map(|rank| Some(rank / 2)));
    let simpler = [pairs, one_host, nodes].into_iter().find(|world| (algorithm.applies)(world));
    simpler.unwrap_or(two_hosts)
}
