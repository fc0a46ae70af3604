//! Memory nodes (NUMA). Each has some cores, and memory that is nearer to these than to others.

use std::{fs, ops::RangeInclusive, path::Path};

use crate::Cores;

/// Where the kernel lists the nodes and the cores of each.
const LISTED: &str = "/sys/devices/system/node";

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
