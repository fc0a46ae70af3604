//! How many devices a program can use on this host, found without a library of their vendor.
//!
//! | vendor | a device is there if | visible devices |
//! |---|---|---|
//! | NVIDIA | `/dev/nvidia0` and so on, else a render node of the driver `nvidia` | `CUDA_VISIBLE_DEVICES` |
//! | AMD | a render node of the driver `amdgpu` | `ROCR_VISIBLE_DEVICES`, then `HIP_VISIBLE_DEVICES` |
//! | Intel | a render node of the driver `xe` or `i915`, not of a processor's own graphics | |
//!
//! A render node is `/dev/dri/renderD128` and so on. `/sys/class/drm` knows its vendor and its driver, also of
//! devices that a container lacks.

use std::{
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

/// How many GPUs of NVIDIA a program can use; if the host has none, how many of AMD.
///
/// `root` is the directory `/`, `variable` looks up a variable of the environment.
pub fn gpus(root: &Path, variable: impl Fn(&str) -> Option<OsString>) -> usize {
    let files = names(&root.join("dev"));
    let nvidia = files.filter(|name| is_numbered(name, "nvidia")).count();
    let nvidia = if nvidia > 0 { nvidia } else { render_nodes(root, NVIDIA).count() };
    if nvidia > 0 {
        return visible(nvidia, variable("CUDA_VISIBLE_DEVICES"));
    }
    // HIP numbers the devices that ROCr shows it.
    let amd = visible(render_nodes(root, AMD).count(), variable("ROCR_VISIBLE_DEVICES"));
    let hip = variable("HIP_VISIBLE_DEVICES").or_else(|| variable("CUDA_VISIBLE_DEVICES"));
    visible(amd, hip)
}

/// How many discrete GPUs of Intel the host has.
///
/// `root` is the directory `/`.
pub fn xpus(root: &Path) -> usize {
    render_nodes(root, INTEL).filter(|device| is_discrete(device)).count()
}

/// A vendor's number on PCI, and its drivers for devices that compute. With `nouveau` or `radeon` they only draw.
type Vendor = (&'static str, &'static [&'static str]);

const NVIDIA: Vendor = ("0x10de", &["nvidia"]);
const AMD: Vendor = ("0x1002", &["amdgpu"]);
const INTEL: Vendor = ("0x8086", &["xe", "i915"]);

/// The devices of this vendor, as directories of sysfs, that this process finds in /dev.
fn render_nodes(root: &Path, (vendor, drivers): Vendor) -> impl Iterator<Item = PathBuf> {
    let class = root.join("sys/class/drm");
    let nodes = names(&root.join("dev/dri")).filter(|name| is_numbered(name, "renderD"));
    nodes.map(move |name| class.join(name).join("device")).filter(move |device| {
        let of_vendor =
            fs::read_to_string(device.join("vendor")).is_ok_and(|text| text.trim() == vendor);
        let driver = fs::read_link(device.join("driver")).ok();
        let driver = driver.as_deref().and_then(Path::file_name).and_then(OsStr::to_str);
        of_vendor && driver.is_some_and(|driver| drivers.contains(&driver))
    })
}

/// Whether the device is a card. Graphics of a processor are on the first bus of PCI: `0000:00:02.0`.
fn is_discrete(device: &Path) -> bool {
    let address = fs::read_link(device).ok();
    let address = address.as_deref().and_then(Path::file_name).and_then(OsStr::to_str);
    address.is_some_and(|address| address.split(':').nth(1).is_some_and(|bus| bus != "00"))
}

fn names(directory: &Path) -> impl Iterator<Item = OsString> + use<> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name())
}

fn is_numbered(name: &OsStr, prefix: &str) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// How many of `present` devices the list of a variable names: by number, or by an identifier such as `GPU-8f2c...`.
///
/// As for CUDA, the list ends in front of the first entry that is no device (`-1`), and a list with a device twice
/// shows none. Of slices of devices (`MIG-...`) a process can use one.
fn visible(present: usize, list: Option<OsString>) -> usize {
    let Some(list) = list else { return present };
    let list = list.to_string_lossy();
    let mut seen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let is_device = match entry.parse::<usize>() {
            Ok(number) => number < present,
            Err(_) => ["GPU-", "MIG-"].iter().any(|kind| entry.starts_with(kind)),
        };
        if !is_device {
            break;
        }
        if seen.contains(&entry) {
            return 0;
        }
        seen.push(entry);
    }
    match seen.first() {
        Some(first) if first.starts_with("MIG-") => present.min(1),
        _ => seen.len().min(present),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// A host with these files in /dev, and these render nodes: vendor, driver, and address on PCI.
    fn host(devices: &[&str], nodes: &[(&str, &str, &str)]) -> TempDir {
        let root = TempDir::new().unwrap();
        let at = |path: &str| root.path().join(path);
        for directory in ["dev/dri", "sys/class/drm", "sys/devices", "sys/bus/pci/drivers"] {
            fs::create_dir_all(at(directory)).unwrap();
        }
        for device in devices {
            fs::write(at("dev").join(device), "").unwrap();
        }
        for (number, (vendor, driver, address)) in (128..).zip(nodes) {
            let device = at("sys/devices").join(address);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            symlink(at("sys/bus/pci/drivers").join(driver), device.join("driver")).unwrap();
            let node = at("sys/class/drm").join(format!("renderD{number}"));
            fs::create_dir(&node).unwrap();
            symlink(&device, node.join("device")).unwrap();
            fs::write(at("dev/dri").join(format!("renderD{number}")), "").unwrap();
        }
        root
    }

    fn seen(host: &TempDir, variables: &[(&str, &str)]) -> usize {
        gpus(host.path(), |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn gpus_are_device_files_or_render_nodes_of_drivers_that_compute() {
        let nothing = TempDir::new().unwrap();
        assert_eq!((seen(&nothing, &[]), xpus(nothing.path())), (0, 0));
        assert_eq!(seen(&host(&["nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm"], &[]), &[]), 2);
        let nodes = [
            ("0x10de", "nvidia", "0000:01:00.0"),
            ("0x10de", "nouveau", "0000:02:00.0"),
            ("0x1002", "amdgpu", "0000:03:00.0"),
            ("0x1a03", "ast", "0000:04:00.0"),
        ];
        assert_eq!(seen(&host(&[], &nodes), &[]), 1);
        assert_eq!(seen(&host(&["nvidia0", "nvidia1"], &nodes), &[]), 2, "files come first");
        let amd = host(&[], &[nodes[1], nodes[2], ("0x1002", "radeon", "0000:05:00.0"), nodes[3]]);
        assert_eq!(seen(&amd, &[]), 1);
    }

    #[test]
    fn a_container_has_the_devices_in_its_dev_only() {
        let nodes = [("0x1002", "amdgpu", "0000:01:00.0"), ("0x1002", "amdgpu", "0000:02:00.0")];
        let host = host(&[], &nodes);
        assert_eq!(seen(&host, &[]), 2);
        fs::remove_file(host.path().join("dev/dri/renderD128")).unwrap();
        assert_eq!(seen(&host, &[]), 1);
    }

    #[test]
    fn variables_choose_among_the_devices_that_are_there() {
        let four = host(&["nvidia0", "nvidia1", "nvidia2", "nvidia3"], &[]);
        for (list, expected) in [
            ("", 0),
            ("-1", 0),
            ("2", 1),
            (" 0, 3", 2),
            ("3,2,1,0", 4),
            ("0,1,-1,2", 2),
            ("0,4,1", 1),
            ("1,1", 0),
            ("GPU-8f2c,GPU-77aa", 2),
            ("MIG-11,MIG-22", 1),
            ("none", 0),
        ] {
            assert_eq!(seen(&four, &[("CUDA_VISIBLE_DEVICES", list)]), expected, "{list:?}");
        }
        let none = host(&[], &[]);
        assert_eq!(seen(&none, &[("CUDA_VISIBLE_DEVICES", "0,1")]), 0, "no device is there");
        let three = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"];
        let amd = host(&[], &three.map(|address| ("0x1002", "amdgpu", address)));
        let both = [("ROCR_VISIBLE_DEVICES", "1,2"), ("HIP_VISIBLE_DEVICES", "1,2")];
        assert_eq!(seen(&amd, &both[..1]), 2);
        assert_eq!(seen(&amd, &both[1..]), 2);
        assert_eq!(seen(&amd, &both), 1, "the second of ROCr's two");
        assert_eq!(seen(&amd, &[("CUDA_VISIBLE_DEVICES", "0")]), 1);
    }

    #[test]
    fn xpus_are_cards() {
        let nodes = [
            ("0x8086", "i915", "0000:00:02.0"),
            ("0x8086", "i915", "0000:03:00.0"),
            ("0x8086", "xe", "0001:4d:00.0"),
            ("0x8086", "vfio-pci", "0000:05:00.0"),
        ];
        let host = host(&[], &nodes);
        assert_eq!((xpus(host.path()), seen(&host, &[])), (2, 0));
    }
}
