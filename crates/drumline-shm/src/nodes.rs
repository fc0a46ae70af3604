//! Which cores are near each other: memory nodes (NUMA), processors, caches, and the hardware threads of one core.

use std::{collections::BTreeMap, fs, ops::RangeInclusive, path::Path};

use crate::Cores;

/// Where the kernel lists the nodes and the cores of each.
const LISTED: &str = "/sys/devices/system/node";

/// Where the kernel describes each core.
const DESCRIBED: &str = "/sys/devices/system/cpu";

/// What cores may have in common besides their memory node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Common {
    /// A processor, in a socket of its own.
    Socket,
    /// The cache of the last level: a core complex.
    Cache,
    /// A physical core: these are its hardware threads.
    PhysicalCore,
}

impl Cores {
    /// These cores grouped by memory node, in the order of the nodes' numbers. Leaves out nodes that
    /// have none of the cores. Empty where the system does not tell.
    pub fn by_memory_node(&self) -> Vec<(usize, Cores)> {
        self.by_node_of(Path::new(LISTED))
    }

    /// The memory node that all of these cores belong to. `None` where they belong to several, or the
    /// system does not tell.
    pub fn memory_node(&self) -> Option<usize> {
        match self.by_memory_node()[..] {
            [(node, ref cores)] if cores.numbers().eq(self.numbers()) => Some(node),
            _ => None,
        }
    }

    /// These cores grouped by what they have in common, each group at the place of its first core. A core about which
    /// the system does not tell is in a group with all such cores.
    pub fn by(&self, common: Common) -> Vec<Cores> {
        self.by_description(common, Path::new(DESCRIBED))
    }

    fn by_description(&self, common: Common, described: &Path) -> Vec<Cores> {
        let read = |path: String| fs::read_to_string(described.join(path)).ok();
        let told = |core: usize| match common {
            Common::Socket => read(format!("cpu{core}/topology/physical_package_id")),
            Common::PhysicalCore => read(format!("cpu{core}/topology/thread_siblings_list")),
            Common::Cache => [3, 2]
                .into_iter()
                .find_map(|index| read(format!("cpu{core}/cache/index{index}/shared_cpu_list"))),
        };
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut places = BTreeMap::new();
        for core in self.numbers() {
            let place = *places.entry(told(core)).or_insert(groups.len());
            if place == groups.len() {
                groups.push(Vec::new());
            }
            groups[place].push(core);
        }
        groups.into_iter().map(Cores::of).collect()
    }

    fn by_node_of(&self, listed: &Path) -> Vec<(usize, Cores)> {
        let entries = fs::read_dir(listed).into_iter().flatten().flatten();
        let of_node = |entry: fs::DirEntry| {
            let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let ranges = ranges(&fs::read_to_string(entry.path().join("cpulist")).ok()?)?;
            let has = |core: &usize| ranges.iter().any(|range| range.contains(core));
            let cores = Cores::of(self.numbers().filter(has));
            let is_any = cores.numbers().next().is_some();
            is_any.then_some((node, cores))
        };
        let mut nodes: Vec<(usize, Cores)> = entries.filter_map(of_node).collect();
        nodes.sort_unstable_by_key(|(node, _)| *node);
        nodes
    }
}

/// Parses a list such as `0-3,8`.
fn ranges(list: &str) -> Option<Vec<RangeInclusive<usize>>> {
    let range = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter(|text| !text.is_empty()).map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read_as_the_kernel_writes_them() {
        assert_eq!(ranges("0-3,8\n"), Some(vec![0..=3, 8..=8]));
        assert_eq!(ranges("\n"), Some(vec![])); // memory without cores
        assert_eq!(ranges("0-x"), None);
    }

    #[test]
    fn cores_are_grouped_by_what_the_system_says_of_each() {
        let cores = Cores::of([0, 1, 2, 3, 9]);
        let dir = tempfile::tempdir().unwrap();
        let tell = |core: usize, file: &str, text: &str| {
            let file = dir.path().join(format!("cpu{core}")).join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        for core in 0..4 {
            tell(core, "topology/physical_package_id", &format!("{}\n", core / 2));
            tell(core, "topology/thread_siblings_list", &format!("{},{}", core % 2, core % 2 + 2));
            tell(core, "cache/index2/shared_cpu_list", &core.to_string());
        }
        tell(0, "cache/index3/shared_cpu_list", "0-2");
        tell(1, "cache/index3/shared_cpu_list", "0-2");
        let by = |common| {
            let groups = cores.by_description(common, dir.path()).into_iter();
            groups.map(|group| group.numbers().collect()).collect::<Vec<Vec<_>>>()
        };
        assert_eq!(by(Common::Socket), [vec![0, 1], vec![2, 3], vec![9]]);
        assert_eq!(by(Common::PhysicalCore), [vec![0, 2], vec![1, 3], vec![9]]);
        assert_eq!(by(Common::Cache), [vec![0, 1], vec![2], vec![3], vec![9]]);
    }

    #[test]
    fn cores_are_grouped_by_the_node_that_lists_them() {
        let own = Cores::of_this_thread().unwrap();
        let numbers: Vec<usize> = own.numbers().collect();
        let list = |of: &[usize]| of.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let nodes = |lists: &[(usize, String)]| {
            let dir = tempfile::tempdir().unwrap();
            for (node, list) in lists {
                let node = dir.path().join(format!("node{node}"));
                fs::create_dir(&node).unwrap();
                fs::write(node.join("cpulist"), list).unwrap();
            }
            fs::write(dir.path().join("online"), "0-1").unwrap();
            let nodes = own.by_node_of(dir.path()).into_iter();
            nodes.map(|(node, cores)| (node, cores.numbers().collect())).collect::<Vec<_>>()
        };
        // Node 0 has memory only. Node 1 has a core that this thread may not use.
        let others = [(0, "\n".to_owned()), (1, "1023".to_owned()), (3, list(&numbers))];
        assert_eq!(nodes(&others), [(3, numbers.clone())]);
        if let [first, rest @ ..] = &numbers[..]
            && !rest.is_empty()
        {
            let expected = [(0, vec![*first]), (1, rest.to_vec())];
            assert_eq!(nodes(&[(1, list(rest)), (0, list(&[*first]))]), expected);
        }
        assert!(own.by_node_of(Path::new("/nowhere")).is_empty());
    }
}
