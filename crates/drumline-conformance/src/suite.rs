//! The list of cases.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use drumline::{DType, ReduceOp};
use drumline_schedule::Topology;
use fastrand::Rng;

use crate::{
    Case, Kind, Part, World,
    on_group::{Form, check},
};

/// The number of cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// Every collective and form at the sizes around which algorithms change.
    Sizes,
    /// The same, and also every type and operator with few elements.
    Small,
    /// Every collective and form with long buffers, which take many pieces and many messages.
    Large,
    /// Every combination of collective, type, operator, root, form and size. Of the longest size, only calls
    /// that together contain every pair of the other properties. Every rank is a root; in the other extents
    /// only the first and the last.
    All,
}

/// Elements around which algorithms change: none, one, fewer than ranks, and about a page.
pub const SIZES: [usize; 6] = [0, 1, 7, 1023, 1024, 1025];

/// Longer than slots and socket buffers, and odd.
pub const LONG: usize = (1 << 20) + 3;

/// Numbers of ranks.
pub const WORLD_SIZES: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16];

/// A case and the form of its call.
pub type Call = (Case, Form);

/// Every call of an extent in groups of this size.
pub fn calls(extent: Extent, world_size: usize) -> Vec<Call> {
    let two_roots = match world_size {
        1 => vec![0],
        _ => vec![0, world_size - 1],
    };
    let sums = &[(DType::F32, ReduceOp::Sum)][..];
    let mut list = List { world_size, calls: Vec::new() };
    match extent {
        Extent::Sizes => list.cross(&SIZES, sums, &two_roots),
        Extent::Small => {
            list.cross(&SIZES, sums, &two_roots);
            list.cross(&[7], &all_types(), &two_roots);
        }
        Extent::Large => list.cross(&[LONG], sums, &two_roots),
        Extent::All => {
            let all_roots: Vec<usize> = (0..world_size).collect();
            list.cross(&[LONG], &all_types(), &all_roots);
            let mut calls = std::mem::take(&mut list.calls);
            keep_pairs(&mut calls);
            list.calls = calls;
            list.cross(&SIZES, &all_types(), &all_roots);
        }
    }
    list.calls
}

/// Every type with every operator that it supports.
//
// Written as loops, because rustc 1.95 compiles `flat_map` and `filter` here to code that crashes: it looks up
// the type of an inner iterator in a table even when there is no such iterator.
fn all_types() -> Vec<(DType, ReduceOp)> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        for op in ReduceOp::ALL {
            if op.supports(dtype) {
                all.push((dtype, op));
            }
        }
    }
    all
}

struct List {
    world_size: usize,
    calls: Vec<Call>,
}

impl List {
    /// Adds every collective in each of these sizes, types and roots, and in every form.
    fn cross(&mut self, sizes: &[usize], types: &[(DType, ReduceOp)], roots: &[usize]) {
        for &size in sizes {
            for &(dtype, op) in types {
                // Collectives that reduce nothing appear once per type, and a barrier once in all.
                let kinds = kinds(op, roots).into_iter().filter(|kind| match kind {
                    Kind::Barrier => (dtype, op) == types[0],
                    kind => kind.reduce_op().is_some() || op == ReduceOp::Sum,
                });
                kinds.for_each(|kind| self.add(kind, dtype, size));
            }
        }
    }

    fn add(&mut self, kind: Kind, dtype: DType, size: usize) {
        // It is enough if all blocks together are long.
        let elements = match kind.has_blocks() && size == LONG {
            true => size.div_ceil(self.world_size),
            false => size,
        };
        for uneven in [false, true] {
            if !uneven || kind.has_blocks() {
                let seed = self.calls.len() as u64;
                let case = Case { kind, dtype, elements, uneven, seed };
                let forms = Form::ALL.into_iter().filter(|form| form.is_of(kind));
                self.calls.extend(forms.map(|form| (case, form)));
            }
        }
    }
}

/// Keeps calls so that each pair of [`values`] still occurs together in a call.
fn keep_pairs(calls: &mut Vec<Call>) {
    // Shuffled, because neighbours in the list have most of their values in common.
    Rng::with_seed(0).shuffle(calls);
    let mut seen = HashSet::new();
    calls.retain(|call| {
        let values = values(call);
        let pairs = (1..values.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
        let pair = |(a, b): (usize, usize)| (a, values[a].clone(), b, values[b].clone());
        pairs.fold(false, |any, at| seen.insert(pair(at)) | any)
    });
}

/// The properties of a call without its size.
pub fn values((case, form): &Call) -> [String; 6] {
    let Case { kind, dtype, uneven, .. } = case;
    [
        format!("{:?}", kind.collective()),
        format!("{dtype:?}"),
        format!("{:?}", kind.reduce_op()),
        format!("root {:?}", kind.root()),
        format!("uneven {uneven}"),
        format!("{form:?}"),
    ]
}

/// Every collective, rooted ones at each of `roots`.
fn kinds(op: ReduceOp, roots: &[usize]) -> Vec<Kind> {
    let mut kinds = vec![
        Kind::AllReduce(op),
        Kind::ReduceSlices(op),
        Kind::ReduceScatter(op),
        Kind::AllGather,
        Kind::AllToAll,
        Kind::Barrier,
    ];
    for &root in roots {
        kinds.extend([
            Kind::Reduce(op, root),
            Kind::Broadcast(root),
            Kind::Gather(root),
            Kind::Scatter(root),
        ]);
    }
    kinds
}

/// Runs the calls of `extent` in groups of these sizes.
///
/// # Errors
///
/// The error of the first call that fails.
pub fn run(world: &dyn World, world_sizes: &[usize], extent: Extent) -> Result<(), String> {
    run_part(world, world_sizes, extent, Part::WHOLE)
}

/// Runs a part of the calls of `extent` in groups of each of these sizes.
///
/// # Errors
///
/// The error of the first call that fails.
pub fn run_part(
    world: &dyn World,
    world_sizes: &[usize],
    extent: Extent,
    part: Part,
) -> Result<(), String> {
    for &world_size in world_sizes {
        let calls = part.of(calls(extent, world_size));
        let answers: Vec<_> = calls.iter().map(|_| Mutex::new(Weak::new())).collect();
        let all = |group: &drumline::ProcessGroup| {
            for ((case, form), answers) in calls.iter().zip(&answers) {
                check(case, *form, group, &once(case, world_size, answers)[group.rank()])?;
            }
            Ok(())
        };
        world.run(world_size, &all).map_err(|problem| format!("{}: {problem}", world.name()))?;
    }
    Ok(())
}

/// The expected results of a case. The first rank that asks computes them; they are kept while a rank needs
/// them.
type Answers = Vec<Arc<Vec<u8>>>;

fn once(case: &Case, world_size: usize, known: &Mutex<Weak<Answers>>) -> Arc<Answers> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    known.upgrade().unwrap_or_else(|| {
        let answers = Arc::new(case.answers(&Topology::flat(world_size)));
        *known = Arc::downgrade(&answers);
        answers
    })
}
