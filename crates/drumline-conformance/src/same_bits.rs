//! Sums the same input over every transport by every algorithm, and compares digests of the bits.

use std::{collections::BTreeMap, sync::Mutex};

use drumline::{DType, ReduceOp, algorithms::SumOrder};
use drumline_schedule::{ALGORITHMS, Algorithm, Collective, MemoryUse, Topology};

use crate::{
    Case, Kind, Threads, World,
    on_group::{Form, perform},
    suite::SIZES,
};

/// Numbers of ranks.
pub const WORLD_SIZES: [usize; 5] = [2, 3, 4, 6, 8];

/// Sums of every size around which algorithms change, and of one size that takes several messages. Also
/// other operators and integers.
pub fn cases() -> Vec<Case> {
    let case = |op, dtype, elements| {
        let kind = Kind::AllReduce(op);
        Case { kind, dtype, elements, uneven: false, seed: 11 }
    };
    let floats = [DType::F32, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2];
    let sums = floats.into_iter().flat_map(|dtype| {
        let sizes = SIZES.into_iter().chain([5000]);
        sizes.map(move |elements| case(ReduceOp::Sum, dtype, elements))
    });
    let others = [DType::F32, DType::F64, DType::I64, DType::U8].into_iter().flat_map(|dtype| {
        let ops = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max];
        ops.map(|op| case(op, dtype, 1023))
    });
    sums.chain(others).collect()
}

/// A way to sum.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// The algorithm.
    pub algorithm: &'static Algorithm,
    /// The form of the call.
    pub form: Form,
}

impl Way {
    /// All ways for ranks that are placed like this, with or without shared memory.
    pub fn all(topology: &Topology, share_memory: bool) -> impl Iterator<Item = Way> {
        let rows = ALGORITHMS.iter().filter(move |row| {
            row.collective == Collective::AllReduce
                && (row.applies)(topology)
                && (share_memory || row.memory == MemoryUse::Private)
        });
        rows.map(|algorithm| {
            let is_registered = algorithm.memory == MemoryUse::Registered;
            Way { algorithm, form: if is_registered { Form::Registered } else { Form::Blocking } }
        })
    }

    /// Whether this way serves a case: narrow floats cannot be widened in registered memory.
    pub fn serves(&self, case: &Case) -> bool {
        let in_place = self.form == Form::Registered
            && self.algorithm.partial_sums_travel
            && !self.algorithm.sums_apart;
        !in_place || case.dtype == DType::F32
    }
}

/// The digest of each case, and the way that gave it first.
#[derive(Debug, Default)]
pub struct Digests {
    of_case: BTreeMap<String, (u64, String)>,
    compared: usize,
}

impl Digests {
    /// Adds the digest that the way `by` gave.
    ///
    /// # Errors
    ///
    /// The digest differs from the first one of its case; the text names both ways.
    pub fn add(
        &mut self,
        case: &Case,
        world_size: usize,
        digest: u64,
        by: &str,
    ) -> Result<(), String> {
        let key = format!("{case:?} of {world_size} ranks");
        match self.of_case.get(&key) {
            Some((first, first_by)) if *first != digest => {
                Err(format!("{key}: other bits by {by} than by {first_by}"))
            }
            Some(_) => {
                self.compared += 1;
                Ok(())
            }
            None => {
                self.of_case.insert(key, (digest, by.to_owned()));
                Ok(())
            }
        }
    }

    /// The number of digests that were equal to the first one of their case.
    pub fn compared(&self) -> usize {
        self.compared
    }
}

/// Sums all [`cases`] with threads for ranks, in every [way](Way) over shared memory, Unix sockets
/// and TCP.
///
/// # Errors
///
/// Bits differ, or a call failed.
pub fn over_real_transports(digests: &mut Digests) -> Result<(), String> {
    for world_size in WORLD_SIZES {
        for (threads, share_memory) in Threads::everywhere().into_iter().zip([true, false, false]) {
            let topology = match share_memory {
                true => Topology::placed(vec![0; world_size]),
                false => Topology::flat(world_size),
            };
            for way in Way::all(&topology.with_order(SumOrder::Rank), share_memory) {
                let name = way.algorithm.name;
                let threads = threads.clone();
                let threads = threads.with(|config| config.all_reduce = Some(name.to_owned()));
                run(&threads, world_size, way, digests)?;
            }
        }
    }
    Ok(())
}

/// The digests of all [`cases`] on `group`, in order.
///
/// # Errors
///
/// The case that failed, and why.
pub fn digests_on(group: &drumline::ProcessGroup) -> Result<Vec<u64>, String> {
    let digest = |case: Case| {
        let found = perform(&case, Form::Blocking, group);
        found.map(|found| case.digest(&found)).map_err(|problem| format!("{case:?}: {problem}"))
    };
    cases().into_iter().map(digest).collect()
}

fn run(
    threads: &Threads,
    world_size: usize,
    way: Way,
    digests: &mut Digests,
) -> Result<(), String> {
    let cases: Vec<Case> = cases().into_iter().filter(|case| way.serves(case)).collect();
    let found = Mutex::new(Vec::new());
    let by = format!("{}, {}", threads.name(), way.algorithm.name);
    let all = |group: &drumline::ProcessGroup| {
        for case in &cases {
            let digest = case.digest(&perform(case, way.form, group)?);
            let mut found = found.lock().map_err(|_| "another rank has panicked")?;
            found.push((*case, digest));
        }
        Ok(())
    };
    threads.run(world_size, &all).map_err(|problem| format!("{by}: {problem}"))?;
    let found = found.into_inner().map_err(|_| "a rank has panicked")?;
    found.iter().try_for_each(|(case, digest)| digests.add(case, world_size, *digest, &by))
}
