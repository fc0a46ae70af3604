//! Which cases there are.

use drumline::{DType, ReduceOp};

use crate::{
    Case, Kind, World,
    on_group::{Form, check},
};

/// How much is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// Every operation and form at the sizes around which algorithms change.
    Sizes,
    /// The same, and every type and operator with few elements.
    Small,
    /// Every operation and form at sizes that take other ways, too: many pieces, many messages.
    Large,
    /// Every combination of all of them. Here every rank is a root; elsewhere the first and the last.
    All,
}

/// Around every border that an algorithm may have: none, one, fewer than there are ranks, a page
/// and its neighbours.
pub const SIZES: [usize; 6] = [0, 1, 7, 1023, 1024, 1025];

/// Longer than slots and socket buffers, and odd.
pub const LONG: usize = (1 << 20) + 3;

/// Every case of an extent for groups of this size.
pub fn cases(extent: Extent, world_size: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |kind: Kind, dtype, elements: usize| {
        for uneven in [false, true] {
            if !uneven || kind.has_blocks() {
                let seed = cases.len() as u64;
                cases.push(Case { kind, dtype, elements, uneven, seed });
            }
        }
    };
    let mut roots = match extent {
        Extent::All => (0..world_size).collect(),
        _ => vec![0, world_size - 1],
    };
    roots.dedup();
    for kind in kinds(ReduceOp::Sum, &roots) {
        match extent {
            Extent::Large if kind.has_blocks() => add(kind, DType::F32, LONG / world_size),
            Extent::Large => add(kind, DType::F32, LONG),
            _ => SIZES.iter().for_each(|size| add(kind, DType::F32, *size)),
        }
    }
    let sizes: &[usize] = match extent {
        Extent::Small => &[7],
        Extent::Sizes | Extent::Large => &[],
        Extent::All => &[0, 1, 7, 1023, 1024, 1025, LONG],
    };
    for &size in sizes {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)) {
                let reducing = |kind: &Kind| kind.reduce_op().is_some();
                // Once for each type is enough where nothing is reduced.
                let kinds = kinds(op, &roots).into_iter();
                kinds
                    .filter(|kind| reducing(kind) || op == ReduceOp::Sum)
                    .for_each(|kind| add(kind, dtype, size));
            }
        }
    }
    cases
}

/// Every collective, rooted ones at each of `roots`.
fn kinds(op: ReduceOp, roots: &[usize]) -> Vec<Kind> {
    let mut kinds = vec![
        Kind::AllReduce(op),
        Kind::ReduceScatter(op),
        Kind::Scan(op),
        Kind::ExclusiveScan(op),
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

/// Carries out the cases of `extent` in groups of these sizes, each in every form.
///
/// # Errors
///
/// What the first case that fails says.
pub fn run(world: &dyn World, world_sizes: &[usize], extent: Extent) -> Result<(), String> {
    for &world_size in world_sizes {
        let cases = cases(extent, world_size);
        let all = |group: &drumline::ProcessGroup| {
            for case in &cases {
                for form in Form::ALL.into_iter().filter(|form| form.is_of(case.kind)) {
                    check(case, form, group)?;
                }
            }
            Ok(())
        };
        world.run(world_size, &all).map_err(|problem| format!("{}: {problem}", world.name()))?;
    }
    Ok(())
}
