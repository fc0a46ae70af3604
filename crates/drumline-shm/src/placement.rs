//! Where the memory, the GPUs and the network lines of this host are: at which memory node (NUMA).
//!
//! All of it is read from the kernel. No library of a vendor is needed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// One memory node, and what is near it.
///
/// ```
/// use drumline_shm::{MemoryNode, memory_nodes};
///
/// for MemoryNode { number, memory_bytes, gpus, lines } in memory_nodes() {
///     println!("node {number:?}: {memory_bytes:?} bytes, {} GPUs, lines {}", gpus.len(), lines.join(", "));
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryNode {
    /// Its number. `None`: what the kernel puts nowhere.
    pub number: Option<usize>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// The addresses of its GPUs on PCI.
    pub gpus: Vec<String>,
    /// Its network interfaces that are devices, with the speed of those that are up: `eth0 25 Gb/s`.
    pub lines: Vec<String>,
}

/// The memory nodes of this host, in the order of their numbers. Devices that the kernel puts at no node come last.
pub fn memory_nodes() -> Vec<MemoryNode> {
    nodes_of(Path::new("/"))
}

fn nodes_of(root: &Path) -> Vec<MemoryNode> {
    let mut nodes: BTreeMap<Option<usize>, MemoryNode> = BTreeMap::new();
    let listed = root.join("sys/devices/system/node");
    for name in names(&listed) {
        let Some(number) = name.strip_prefix("node").and_then(|it| it.parse().ok()) else {
            continue;
        };
        let information =
            fs::read_to_string(listed.join(&name).join("meminfo")).unwrap_or_default();
        let node = nodes.entry(Some(number)).or_default();
        node.memory_bytes = information.lines().find_map(|line| {
            let (_, kib) = line.split_once("MemTotal:")?;
            Some(kib.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
        });
    }
    for gpu in Gpu::all(root) {
        nodes.entry(gpu.node).or_default().gpus.push(gpu.address);
    }
    let class = root.join("sys/class/net");
    for name in names(&class) {
        let interface = class.join(&name);
        if !interface.join("device").exists() {
            continue; // lo, bridges and so on
        }
        let speed = read(&interface.join("speed")).and_then(|it| it.parse::<u64>().ok());
        let line = match speed {
            Some(mbps) => format!("{name} {} Gb/s", mbps as f64 / 1e3),
            None => name,
        };
        nodes.entry(node_of(&interface.join("device"))).or_default().lines.push(line);
    }
    // `None` is the least of all keys. Where there is one node only, all is there.
    let mut nowhere = nodes.remove(&None);
    if nodes.len() == 1
        && let Some(only) = nodes.values_mut().next()
        && let Some(MemoryNode { gpus, lines, .. }) = nowhere.take()
    {
        only.gpus.extend(gpus);
        only.lines.extend(lines);
    }
    let placed = nodes.into_iter().map(|(number, node)| MemoryNode { number, ..node });
    placed.chain(nowhere).collect()
}

/// The memory node of each GPU that this process may use, in the order in which CUDA and HIP number equal GPUs. Empty if
/// the kernel does not tell the node of each.
pub(crate) fn nodes_of_gpus() -> Vec<usize> {
    let visible = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"];
    let list = visible.into_iter().find_map(std::env::var_os);
    chosen(&Gpu::all(Path::new("/")), list)
}

/// The nodes of the GPUs in a list such as `0,2`; of all without a list.
fn chosen(gpus: &[Gpu], list: Option<OsString>) -> Vec<usize> {
    let node = |gpu: &Gpu| gpu.node;
    let nodes: Option<Vec<usize>> = match list {
        None => gpus.iter().map(node).collect(),
        // A list of identifiers says nothing about places.
        Some(list) => {
            let numbers = list.to_string_lossy();
            let numbers = numbers.split(',').map(|it| it.trim().parse::<usize>().ok());
            numbers.map(|number| node(gpus.get(number?)?)).collect()
        }
    };
    nodes.unwrap_or_default()
}

/// A GPU that computes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gpu {
    /// On PCI: `0000:41:00.0`.
    address: String,
    node: Option<usize>,
}

/// A vendor's number on PCI, and its driver for GPUs that compute.
const DRIVERS: [(&str, &str); 2] = [("0x10de", "nvidia"), ("0x1002", "amdgpu")];

impl Gpu {
    /// In the order of addresses.
    fn all(root: &Path) -> Vec<Gpu> {
        let devices = root.join("sys/bus/pci/devices");
        let mut gpus: Vec<Gpu> = names(&devices)
            .filter_map(|address| {
                let device = devices.join(&address);
                let vendor = read(&device.join("vendor"))?;
                let driver = fs::read_link(device.join("driver")).ok()?;
                let driver = driver.file_name()?.to_str()?.to_owned();
                let computes = DRIVERS.contains(&(&vendor, &driver));
                // Class 03 is a display controller: the functions for sound are not.
                let is_gpu = read(&device.join("class"))?.starts_with("0x03");
                (computes && is_gpu && is_in_dev(root, &address))
                    .then(|| Gpu { node: node_of(&device), address })
            })
            .collect();
        gpus.sort_by(|one, other| one.address.cmp(&other.address));
        gpus
    }
}

/// Whether a container has this GPU. True where NVIDIA's driver does not tell its number.
fn is_in_dev(root: &Path, address: &str) -> bool {
    let information = root.join("proc/driver/nvidia/gpus").join(address).join("information");
    let text = fs::read_to_string(information).unwrap_or_default();
    let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"));
    minor.is_none_or(|minor| root.join("dev").join(format!("nvidia{}", minor.trim())).exists())
}

/// The node of a device. The kernel writes -1 if it does not know.
fn node_of(device: &Path) -> Option<usize> {
    read(&device.join("numa_node"))?.parse().ok()
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// What is in a directory, in order.
fn names(directory: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names.into_iter()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// A host of two nodes, with these devices of PCI: address, vendor, class, driver and node.
    fn host(devices: &[(&str, &str, &str, &str, &str)]) -> TempDir {
        let root = TempDir::new().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "sys/devices/system/node/node0/meminfo",
            "Node 0 MemTotal:       1024 kB\nNode 0 MemFree: 8 kB\n",
        );
        write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       2048 kB\n");
        write("sys/devices/system/node/online", "0-1\n");
        for (address, vendor, class, driver, node) in devices {
            let device = format!("sys/bus/pci/devices/{address}");
            for (file, text) in [("vendor", vendor), ("class", class), ("numa_node", node)] {
                write(&format!("{device}/{file}"), &format!("{text}\n"));
            }
            let drivers = root.path().join("sys/bus/pci/drivers").join(driver);
            symlink(drivers, root.path().join(&device).join("driver")).unwrap();
        }
        root
    }

    const GPU_0: (&str, &str, &str, &str, &str) =
        ("0000:41:00.0", "0x10de", "0x030200", "nvidia", "0");
    const GPU_1: (&str, &str, &str, &str, &str) =
        ("0000:c1:00.0", "0x10de", "0x030000", "nvidia", "1");
    const SOUND: (&str, &str, &str, &str, &str) =
        ("0000:41:00.1", "0x10de", "0x040300", "snd_hda_intel", "0");
    const DRAWS: (&str, &str, &str, &str, &str) =
        ("0000:02:00.0", "0x10de", "0x030000", "nouveau", "0");
    const LINE: (&str, &str, &str, &str, &str) =
        ("0000:81:00.0", "0x15b3", "0x020000", "mlx5_core", "1");
    const NOWHERE: (&str, &str, &str, &str, &str) =
        ("0000:e1:00.0", "0x1002", "0x038000", "amdgpu", "-1");

    #[test]
    fn gpus_lines_and_memory_are_at_their_nodes() {
        let host = host(&[GPU_1, SOUND, GPU_0, DRAWS, LINE, NOWHERE]);
        let net = host.path().join("sys/class/net");
        for (name, device, speed) in [("ib0", Some(LINE.0), "200000"), ("lo", None, "")] {
            fs::create_dir_all(net.join(name)).unwrap();
            fs::write(net.join(name).join("speed"), speed).unwrap();
            if let Some(device) = device {
                symlink(
                    host.path().join("sys/bus/pci/devices").join(device),
                    net.join(name).join("device"),
                )
                .unwrap();
            }
        }
        let node = |number, kib: u64, gpu: &str, lines: &[&str]| MemoryNode {
            number,
            memory_bytes: (kib > 0).then_some(kib * 1024),
            gpus: vec![gpu.to_owned()],
            lines: lines.iter().map(|it| (*it).to_owned()).collect(),
        };
        let expected = [
            node(Some(0), 1024, GPU_0.0, &[]),
            node(Some(1), 2048, GPU_1.0, &["ib0 200 Gb/s"]),
            node(None, 0, NOWHERE.0, &[]),
        ];
        assert_eq!(nodes_of(host.path()), expected);
        assert_eq!(nodes_of(Path::new("/nowhere")), []);
        fs::remove_dir_all(host.path().join("sys/devices/system/node/node1")).unwrap();
        fs::remove_dir_all(host.path().join("sys/bus/pci/devices").join(GPU_1.0)).unwrap();
        fs::remove_dir_all(net).unwrap();
        let gpus = vec![GPU_0.0.to_owned(), NOWHERE.0.to_owned()];
        let only = MemoryNode { gpus, ..node(Some(0), 1024, "", &[]) };
        assert_eq!(nodes_of(host.path()), [only], "all is at the only node");
    }

    #[test]
    fn a_container_has_the_gpus_in_its_dev_only() {
        let host = host(&[GPU_0, GPU_1]);
        assert_eq!(Gpu::all(host.path()).len(), 2);
        for (minor, address) in [(0, GPU_0.0), (1, GPU_1.0)] {
            let directory = host.path().join("proc/driver/nvidia/gpus").join(address);
            fs::create_dir_all(&directory).unwrap();
            fs::write(
                directory.join("information"),
                format!("Model: X\nDevice Minor: \t {minor}\n"),
            )
            .unwrap();
        }
        fs::create_dir_all(host.path().join("dev")).unwrap();
        fs::write(host.path().join("dev/nvidia1"), "").unwrap();
        let gpus = Gpu::all(host.path());
        assert_eq!(gpus, [Gpu { address: GPU_1.0.to_owned(), node: Some(1) }]);
    }

    #[test]
    fn a_list_chooses_and_orders() {
        let gpus = Gpu::all(host(&[GPU_0, GPU_1]).path());
        let nodes = |list: Option<&str>| chosen(&gpus, list.map(OsString::from));
        assert_eq!(nodes(None), [0, 1]);
        assert_eq!(nodes(Some("1, 0")), [1, 0]);
        assert_eq!(nodes(Some("1")), [1]);
        for unclear in ["GPU-8f2c", "2", ""] {
            assert_eq!(nodes(Some(unclear)), [], "{unclear}");
        }
        let unplaced = Gpu::all(host(&[GPU_0, NOWHERE]).path());
        assert_eq!(chosen(&unplaced, None), []);
    }
}
