//! Predicts how long collectives and training steps take between hosts: the prices by which a group would choose their
//! algorithms. They leave out what moves inside a host.
//!
//! ```text
//! cargo run -p drumline-schedule --example predict -- hosts=16 nproc_per_node=8 nic_byte_fs=320_000 \
//!     gradient_bytes=400_000_000 backward_us=300_000
//! ```

use std::error::Error;

use drumline_schedule::price::{ElementKind, PriceList, price};
use drumline_schedule::{Algorithm, Chooser, Collective, Situation, Topology};

const F32: ElementKind = ElementKind { bytes: 4, sum_bytes: 4 };
const COLLECTIVES: [Collective; 8] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
];
/// Bytes of a block.
const SIZES: [usize; 5] = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20];
const FIRST_BUCKET_BYTES: usize = 1 << 20;
const BUCKET_BYTES: [usize; 4] = [1_000_000, 5_000_000, 25_000_000, 100_000_000];

/// What is asked beside prices, each as `name=number`.
struct Question {
    hosts: usize,
    nproc_per_node: usize,
    gradient_bytes: usize,
    backward_us: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut asked = Question { hosts: 2, nproc_per_node: 1, gradient_bytes: 0, backward_us: 0 };
    let mut prices = String::new();
    for argument in std::env::args().skip(1) {
        let (name, value) = argument.split_once('=').unwrap_or((&argument, ""));
        let number = match name {
            "hosts" => &mut asked.hosts,
            "nproc_per_node" => &mut asked.nproc_per_node,
            "gradient_bytes" => &mut asked.gradient_bytes,
            "backward_us" => &mut asked.backward_us,
            // A price, or a text of them.
            _ => {
                prices += &format!("{argument}\n");
                continue;
            }
        };
        *number = value.replace('_', "").parse().map_err(|error| format!("{argument}: {error}"))?;
    }
    let ranks = asked.hosts.saturating_mul(asked.nproc_per_node);
    if asked.hosts < 2 || !(2..=65_536).contains(&ranks) {
        return Err("there should be 2 hosts or more, and at most 65,536 ranks".into());
    }
    let prices = prices.parse()?;
    let cluster = Cluster::new(&prices, asked.hosts, asked.nproc_per_node);
    println!("{:<16}{:>10}{:>14}  algorithm", "collective", "bytes", "us");
    for (collective, bytes) in COLLECTIVES.iter().flat_map(|it| SIZES.map(|bytes| (*it, bytes))) {
        if let Some((row, ps)) = cluster.time(collective, bytes) {
            let (name, us) = (collective.to_string(), ps as f64 / 1e6);
            println!("{name:<16}{bytes:>10}{us:>14.1}  {}", row.name);
        }
    }
    if asked.gradient_bytes > 0 && asked.backward_us > 0 {
        steps(&asked, &prices);
    }
    Ok(())
}

/// Equal hosts, whose ranks share memory.
struct Cluster<'a> {
    prices: &'a PriceList,
    topology: Topology,
}

impl Cluster<'_> {
    fn new(prices: &PriceList, hosts: usize, nproc_per_node: usize) -> Cluster<'_> {
        Cluster { prices, topology: Topology::hosts(&vec![nproc_per_node; hosts]) }
    }

    /// The algorithm for blocks of so many bytes, and its time in picoseconds.
    fn time(&self, collective: Collective, bytes: usize) -> Option<(&'static Algorithm, u128)> {
        let (prices, elements) = (self.prices.links(&self.topology), bytes.div_ceil(F32.bytes));
        let over_links = Situation::over_links(collective, &self.topology, elements, F32);
        let row =
            Chooser::by(prices).choose(&Situation { long_bytes: Some(1 << 20), ..over_links })?;
        Some((row, price(row, &self.topology, elements, F32, &prices)))
    }
}

/// For 2, 4, ... hosts and all: which share of a step computes, by the size of buckets. The backward pass makes gradients
/// at a constant rate, and buckets travel one after another.
fn steps(asked: &Question, prices: &PriceList) {
    println!(
        "\nforward (half of backward) and backward as a share of the step, by the bytes of buckets"
    );
    println!("{:>8}{}", "hosts", BUCKET_BYTES.map(|bytes| format!("{bytes:>12}")).concat());
    let doublings = std::iter::successors(Some(2), |hosts| Some(hosts * 2));
    for hosts in doublings.take_while(|hosts| *hosts < asked.hosts).chain([asked.hosts]) {
        let cluster = Cluster::new(prices, hosts, asked.nproc_per_node);
        let share = |bucket_bytes| {
            let backward_ps = asked.backward_us as u128 * 1_000_000;
            let (mut done, mut free_at_ps) = (0, 0_u128);
            while done < asked.gradient_bytes {
                let full = if done == 0 { FIRST_BUCKET_BYTES } else { bucket_bytes };
                let bytes = full.min(asked.gradient_bytes - done);
                done += bytes;
                let ready_ps = backward_ps * done as u128 / asked.gradient_bytes as u128;
                let took = cluster.time(Collective::AllReduce, bytes).map_or(0, |(_, ps)| ps);
                free_at_ps = free_at_ps.max(ready_ps) + took;
            }
            let forward_ps = backward_ps / 2;
            let share = (forward_ps + backward_ps) as f64 / (forward_ps + free_at_ps) as f64;
            format!("{:>10.1} %", 100.0 * share)
        };
        println!("{hosts:>8}{}", BUCKET_BYTES.map(share).concat());
    }
}
