//! What a call consists of: the functions that NCCL has.

use std::ffi::c_int;

use drumline_device::Place;
use drumline_kernels::DType;

use crate::nccl::shape::{Seat, apart, count, same_length};
use crate::nccl::supports::number_of;
use drumline_device::fabric::{Call, Operator};

/// One function of NCCL with its arguments. Ranks and counts are what the function takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    AllReduce {
        from: Place,
        to: Place,
        reduction: Reduction,
    },
    /// Where no result comes, `to` is empty.
    Reduce {
        from: Place,
        to: Place,
        reduction: Reduction,
        root: c_int,
    },
    ReduceScatter {
        from: Place,
        to: Place,
        reduction: Reduction,
    },
    Broadcast {
        place: Place,
        root: c_int,
    },
    AllGather {
        from: Place,
        to: Place,
    },
    Send {
        from: Place,
        peer: c_int,
    },
    Receive {
        to: Place,
        peer: c_int,
    },
}

/// How elements of the result come to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reduction {
    /// Elements of the result on each rank.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    /// NCCL's number of the type.
    pub(crate) kind: c_int,
    pub(crate) operator: Operator,
}

const NOTHING: Place = Place { address: 0, bytes: 0 };

/// The steps of a call. None: it concerns no byte.
pub(crate) fn steps(call: &Call, seat: Seat) -> Result<Vec<Step>, String> {
    let steps = match *call {
        Call::AllReduce { from, to, dtype, operator } => {
            same_length(from, to)?;
            apart(from, to, from == to)?;
            let reduction = reduction(&[from, to], dtype, operator)?;
            vec![Step::AllReduce { from, to, reduction }]
        }
        Call::Reduce { from, to, dtype, operator, root } => {
            seat.check(root)?;
            let to = only_on_root(to, root, seat)?.unwrap_or(NOTHING);
            if root == seat.rank {
                same_length(from, to)?;
                apart(from, to, from == to)?;
            }
            let reduction = reduction(&[from, to], dtype, operator)?;
            vec![Step::Reduce { from, to, reduction, root: root as c_int }]
        }
        Call::ReduceScatter { from, to, dtype, operator } => {
            let blocks = seat.blocks(from, to)?;
            apart(from, to, blocks.get(seat.rank) == Some(&to))?;
            let reduction = reduction(&[to, from], dtype, operator)?;
            vec![Step::ReduceScatter { from, to, reduction }]
        }
        Call::Broadcast { place, root } => {
            seat.check(root)?;
            vec![Step::Broadcast { place, root: root as c_int }]
        }
        Call::AllGather { from, to } => {
            let blocks = seat.blocks(to, from)?;
            apart(from, to, blocks.get(seat.rank) == Some(&from))?;
            vec![Step::AllGather { from, to }]
        }
        Call::Gather { from, to, root } => {
            seat.check(root)?;
            let mut steps = vec![Step::Send { from, peer: root as c_int }];
            if let Some(to) = only_on_root(to, root, seat)? {
                let blocks = seat.blocks(to, from)?;
                apart(from, to, blocks.get(root) == Some(&from))?;
                steps.extend(receive_all(&blocks));
            }
            steps
        }
        Call::Scatter { from, to, root } => {
            seat.check(root)?;
            let mut steps = vec![Step::Receive { to, peer: root as c_int }];
            if let Some(from) = only_on_root(from, root, seat)? {
                let blocks = seat.blocks(from, to)?;
                apart(from, to, blocks.get(root) == Some(&to))?;
                steps.extend(send_all(&blocks));
            }
            steps
        }
        Call::AllToAll { from, to } => {
            same_length(from, to)?;
            apart(from, to, false)?;
            send_all(&seat.equal_blocks(from)?)
                .chain(receive_all(&seat.equal_blocks(to)?))
                .collect()
        }
        Call::Send { from, peer } => {
            seat.check(peer)?;
            vec![Step::Send { from, peer: peer as c_int }]
        }
        Call::Receive { to, peer } => {
            seat.check(peer)?;
            vec![Step::Receive { to, peer: peer as c_int }]
        }
    };
    Ok(without_own_in_place(steps, seat).into_iter().filter(|it| !it.is_empty()).collect())
}

fn send_all(blocks: &[Place]) -> impl Iterator<Item = Step> {
    blocks.iter().zip(0..).map(|(from, peer)| Step::Send { from: *from, peer })
}

fn receive_all(blocks: &[Place]) -> impl Iterator<Item = Step> {
    blocks.iter().zip(0..).map(|(to, peer)| Step::Receive { to: *to, peer })
}

/// What a rank would send itself to where it lies already is left out.
fn without_own_in_place(steps: Vec<Step>, seat: Seat) -> Vec<Step> {
    let own = seat.rank as c_int;
    let sent: Vec<Place> = steps
        .iter()
        .filter_map(|step| match step {
            Step::Send { from, peer } if *peer == own => Some(*from),
            _ => None,
        })
        .collect();
    let is_in_place = steps.iter().any(
        |step| matches!(step, Step::Receive { to, peer } if *peer == own && sent.contains(to)),
    );
    let is_own = |step: &Step| matches!(step, Step::Send { peer, .. } | Step::Receive { peer, .. } if *peer == own);
    steps.into_iter().filter(|step| !(is_in_place && is_own(step))).collect()
}

/// A place that the root has to name, and no other rank need.
fn only_on_root(place: Option<Place>, root: usize, seat: Seat) -> Result<Option<Place>, String> {
    match place {
        None if root == seat.rank => Err(format!("rank {root} is the root, and names no place")),
        place => Ok(place.filter(|_| root == seat.rank)),
    }
}

/// Elements are counted in the first place.
fn reduction(places: &[Place], dtype: DType, operator: Operator) -> Result<Reduction, String> {
    let counts: Vec<usize> =
        places.iter().map(|place| count(*place, dtype)).collect::<Result<_, _>>()?;
    let kind = number_of(dtype).map_err(|what| format!("NCCL has no {what}"))?;
    Ok(Reduction { count: counts.first().copied().unwrap_or(0), dtype, kind, operator })
}

impl Step {
    /// What NCCL reads and writes.
    pub(crate) fn places(&self) -> [Place; 2] {
        match *self {
            Step::AllReduce { from, to, .. }
            | Step::Reduce { from, to, .. }
            | Step::ReduceScatter { from, to, .. }
            | Step::AllGather { from, to } => [from, to],
            Step::Broadcast { place, .. }
            | Step::Send { from: place, .. }
            | Step::Receive { to: place, .. } => [place, NOTHING],
        }
    }

    pub(crate) fn reduction(&self) -> Option<&Reduction> {
        match self {
            Step::AllReduce { reduction, .. }
            | Step::Reduce { reduction, .. }
            | Step::ReduceScatter { reduction, .. } => Some(reduction),
            _ => None,
        }
    }

    fn is_empty(&self) -> bool {
        self.places().iter().all(|place| place.bytes == 0)
    }
}

#[cfg(test)]
mod tests {
    use drumline_kernels::ReduceOp;

    use super::*;

    const SEAT: Seat = Seat { rank: 1, size: 3 };
    const SUM: Operator = Operator::Plain(ReduceOp::Sum);

    fn place(address: u64, bytes: usize) -> Place {
        Place { address, bytes }
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let dtype = DType::F32;
        let (a, b) = (place(0x100, 48), place(0x200, 48));
        let reduce = |from, to| Call::AllReduce { from, to, dtype, operator: SUM };
        let scatter = |to| Call::ReduceScatter { from: a, to, dtype, operator: SUM };
        for (call, problem) in [
            (reduce(a, place(0x200, 44)), "do not fit"),
            (reduce(a, place(0x104, 48)), "overlap"),
            (reduce(place(0x100, 46), place(0x200, 46)), "are not a number of f32"),
            (reduce(place(0x102, 48), b), "are not aligned for f32"),
            (scatter(place(0x200, 12)), "are not 3 blocks of 12 bytes"),
            (scatter(place(0x100, 16)), "overlap"),
            (Call::AllGather { from: place(0x200, 16), to: b }, "overlap"),
            (Call::AllToAll { from: a, to: a }, "overlap"),
            (Call::AllToAll { from: place(0, 7), to: place(8, 7) }, "for 3 ranks"),
            (Call::Broadcast { place: a, root: 3 }, "no rank 3: the communicator has 3 ranks"),
            (Call::Send { from: a, peer: 9 }, "no rank 9"),
            (Call::Receive { to: a, peer: 3 }, "no rank 3"),
            (Call::Gather { from: a, to: None, root: 1 }, "names no place"),
            (Call::Scatter { from: None, to: a, root: 1 }, "names no place"),
            (Call::Gather { from: a, to: Some(b), root: 1 }, "are not 3 blocks of 48 bytes"),
            (
                Call::AllReduce { from: a, to: b, dtype: DType::I16, operator: SUM },
                "no integers of 16 bits",
            ),
        ] {
            let said = steps(&call, SEAT).unwrap_err();
            assert!(said.contains(problem), "{call:?}: {said}");
        }
    }

    #[test]
    fn in_place_is_as_the_operation_says() {
        let (dtype, operator) = (DType::F32, SUM);
        let whole = place(0x100, 48);
        let own = place(0x110, 16);
        for call in [
            Call::AllReduce { from: whole, to: whole, dtype, operator },
            Call::ReduceScatter { from: whole, to: own, dtype, operator },
            Call::AllGather { from: own, to: whole },
        ] {
            assert_eq!(steps(&call, SEAT).unwrap().len(), 1, "{call:?}");
        }
        // Nobody sends himself what he has.
        for call in [
            Call::Gather { from: own, to: Some(whole), root: 1 },
            Call::Scatter { from: Some(whole), to: own, root: 1 },
        ] {
            assert_eq!(steps(&call, SEAT).unwrap().len(), 2, "{call:?}");
        }
    }

    #[test]
    fn nothing_is_no_step() {
        let none = place(0, 0);
        for call in [
            Call::AllReduce { from: none, to: none, dtype: DType::F32, operator: SUM },
            Call::Gather { from: none, to: Some(none), root: 1 },
            Call::AllToAll { from: none, to: none },
            Call::Broadcast { place: none, root: 0 },
        ] {
            assert_eq!(steps(&call, SEAT).unwrap(), [], "{call:?}");
        }
    }
}
