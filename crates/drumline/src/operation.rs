//! A collective together with its buffers.

use std::borrow::Cow;

use drumline_kernels::{Element, Source, Target, narrow, scale, widen, with_ieee_rounding};
use drumline_schedule::{
    Collective, Schedule,
    step::{Buffer, Loc, Rank},
    tree::{Node, merges},
};

use crate::{
    Cause, ReduceOp,
    backend::Reduce,
    call::Call,
    executor::{Buffers, Layout, Memory, Pool},
    host::Host,
    lane::{OnBytes, Operation},
    operator::{Combine, Operator},
};

/// A call with its operator, of which the call itself only knows the kind.
#[derive(Debug)]
pub(crate) struct Request<T> {
    pub(crate) call: Call,
    pub(crate) operator: Operator<T>,
}

/// A call that reduces nothing: its operator is not looked at.
impl<T> From<Call> for Request<T> {
    fn from(call: Call) -> Request<T> {
        Request { call, operator: ReduceOp::Sum.into() }
    }
}

/// A call on buffers that are lent (`&mut [T]`, `&[T]`) or owned.
#[derive(Debug)]
pub(crate) struct CallOn<T: Element, D, I> {
    call: Call,
    operator: Operator<T>,
    /// What this rank's data were before they were multiplied, where the operation leaves them as
    /// they are.
    unscaled: Option<Vec<T>>,
    state: State<T, D, I>,
}

#[derive(Debug)]
enum State<T: Element, D, I> {
    /// Not begun, or ended.
    Idle(D, I),
    /// Works on the caller's elements.
    Exact(Buffers<T, D, Contribution<T, I>>),
    /// Partial sums travel: works on copies in the type that sums are kept in, so that nothing
    /// is rounded before the end.
    Wide {
        buffers: Buffers<T::Accumulator, WideData<T>, WideData<T>>,
        data: D,
        input: I,
        /// Whether this rank gets a result.
        writes: bool,
    },
    /// Between two of the others.
    Empty,
}

type WideData<T> = Vec<<T as Element>::Accumulator>;

/// A buffer that is only read.
#[derive(Debug)]
struct Contribution<T, I> {
    callers: I,
    /// What is read in its place: multiples of its elements.
    scaled: Option<Vec<T>>,
}

impl<T, I: AsRef<[T]>> AsRef<[T]> for Contribution<T, I> {
    fn as_ref(&self) -> &[T] {
        self.scaled.as_deref().unwrap_or(self.callers.as_ref())
    }
}

/// Multiplies what this rank contributes: the input where there is one, else the data, in place.
fn contribute<T, D, I>(factor: Option<T>, data: &mut D, callers: I) -> Contribution<T, I>
where
    T: Element,
    D: AsMut<[T]>,
    I: AsRef<[T]>,
{
    let Some(factor) = factor else { return Contribution { callers, scaled: None } };
    with_ieee_rounding(|| {
        if callers.as_ref().is_empty() {
            scale(Target::from(data.as_mut()), factor);
            return Contribution { callers, scaled: None };
        }
        let mut scaled = callers.as_ref().to_vec();
        scale(Target::from(&mut scaled[..]), factor);
        Contribution { callers, scaled: Some(scaled) }
    })
}

impl<T, D, I> CallOn<T, D, I>
where
    T: Element,
    D: AsMut<[T]> + AsRef<[T]>,
    I: AsRef<[T]>,
{
    pub(crate) fn new(request: impl Into<Request<T>>, data: D, input: I) -> CallOn<T, D, I> {
        let Request { call, operator } = request.into();
        CallOn { call, operator, unscaled: None, state: State::Idle(data, input) }
    }

    /// The caller's buffer, once the operation has ended.
    pub(crate) fn into_data(self) -> Option<D> {
        match self.state {
            State::Idle(data, _) => Some(data),
            State::Exact(_) | State::Wide { .. } | State::Empty => None,
        }
    }

    /// The caller's buffer, wherever the operation stands.
    pub(crate) fn data(&self) -> Option<&D> {
        match &self.state {
            State::Idle(data, _) | State::Wide { data, .. } => Some(data),
            State::Exact(buffers) => Some(buffers.data()),
            State::Empty => None,
        }
    }
}

fn widened<T: Element>(elements: &impl AsRef<[T]>) -> WideData<T> {
    let elements = elements.as_ref();
    let mut wide = vec![bytemuck::Zeroable::zeroed(); elements.len()];
    widen(Target::from(&mut wide[..]), Source::from(elements));
    wide
}

/// Whether `rank` brings its data to a reduction and keeps it as it is.
fn gets_nothing(collective: Collective, rank: Rank, root: Rank) -> bool {
    match collective {
        Collective::Reduce => rank != root,
        Collective::ExclusiveScan => rank == 0,
        _ => false,
    }
}

/// The elements that begin at any byte: borrowed where they can be, or copied.
fn elements<T: Element>(bytes: &[u8]) -> Cow<'_, [T]> {
    bytemuck::try_cast_slice(bytes).map(Cow::Borrowed).unwrap_or_else(|_| {
        let mut copy = vec![T::zeroed(); bytes.len() / size_of::<T>()];
        bytemuck::cast_slice_mut(&mut copy).copy_from_slice(bytes);
        Cow::Owned(copy)
    })
}

impl<T: Element> Reduce for Combine<T> {
    fn reduce(&self, inputs: &[&[u8]], output: &mut [u8]) -> Result<(), Cause> {
        let ranks = inputs.len();
        let leaves: Vec<Node> = (0..ranks).map(Node::leaf).collect();
        let Some(merges) = merges(Node::root(ranks), &leaves) else {
            unreachable!("the leaves of a tree tile it");
        };
        // What came from elsewhere may lie at any byte.
        let inputs: Vec<Cow<'_, [T]>> = inputs.iter().map(|bytes| elements(bytes)).collect();
        let srcs: Vec<Source<'_, T>> =
            inputs.iter().map(|input| Source::from(&input[..])).collect();
        let mut result = vec![T::zeroed(); output.len() / size_of::<T>()];
        with_ieee_rounding(|| {
            self.tree(&[Target::from(&mut result[..])], &srcs, &merges, Some(ranks))
        })?;
        output.copy_from_slice(bytemuck::cast_slice(&result));
        Ok(())
    }
}

impl<T, D, I> Operation for CallOn<T, D, I>
where
    T: Element,
    D: AsMut<[T]> + AsRef<[T]>,
    I: AsRef<[T]>,
{
    fn call(&self) -> &Call {
        &self.call
    }

    fn registered(&self, host: &Host) -> Option<u64> {
        let offset = host.arena().offset_of(self.data()?.as_ref())?;
        Some(offset as u64)
    }

    fn detach(&mut self, host: &Host) {
        if self.registered(host).is_none() {
            return;
        }
        if let State::Idle(data, _) = &mut self.state
            && let Err(error) = host.arena().detach(data.as_mut())
        {
            tracing::error!(%error, "a registered buffer may be written to by ranks that are late");
        }
    }

    fn prepare(&mut self, schedule: &Schedule, layout: &Layout, wide: bool, pool: &mut Pool) {
        let Operator { factor, combine } = &self.operator;
        let layout = layout.clone();
        let state = std::mem::replace(&mut self.state, State::Empty);
        self.state = match state {
            State::Idle(mut data, input) => {
                let is_data = |loc: Loc| loc.buffer == Buffer::Data;
                let writes = schedule.steps.iter().any(|step| step.writes().any(is_data));
                let gets_nothing = gets_nothing(schedule.collective, schedule.rank, schedule.root);
                if factor.is_some() && gets_nothing {
                    self.unscaled = Some(data.as_ref().to_vec());
                }
                let input = contribute(*factor, &mut data, input);
                match combine {
                    Combine::Builtin(op) if wide => {
                        let op = Combine::Builtin(*op);
                        let (wide_data, wide_input) = (widened(&data), widened(&input));
                        let buffers =
                            Buffers::new(schedule, layout, op, wide_data, wide_input, pool);
                        State::Wide { buffers, data, input: input.callers, writes }
                    }
                    _ => {
                        let op = combine.clone();
                        State::Exact(Buffers::new(schedule, layout, op, data, input, pool))
                    }
                }
            }
            other => other,
        };
    }

    fn memory(&mut self) -> &mut dyn Memory {
        match &mut self.state {
            State::Exact(buffers) => buffers,
            State::Wide { buffers, .. } => buffers,
            State::Idle(..) | State::Empty => unreachable!("memory is asked for after `prepare`"),
        }
    }

    fn release(&mut self, pool: &mut Pool) {
        let state = std::mem::replace(&mut self.state, State::Empty);
        self.state = match state {
            State::Exact(buffers) => {
                let (mut data, input) = buffers.recycle(pool);
                if let Some(unscaled) = self.unscaled.take() {
                    data.as_mut().copy_from_slice(&unscaled);
                }
                State::Idle(data, input.callers)
            }
            State::Wide { buffers, mut data, input, writes } => {
                let (wide, _) = buffers.recycle(pool);
                if writes {
                    narrow(Target::from(data.as_mut()), Source::from(&wide[..]));
                }
                if let Some(unscaled) = self.unscaled.take() {
                    data.as_mut().copy_from_slice(&unscaled);
                }
                State::Idle(data, input)
            }
            other => other,
        };
    }

    fn on_bytes(&mut self, rank: Rank, carry_out: &mut OnBytes<'_>) -> Result<(), Cause> {
        let root = self.call.root.unwrap_or(0);
        let gets_nothing = gets_nothing(self.call.operation.collective(), rank, root);
        let State::Idle(data, input) = &mut self.state else {
            unreachable!("an operation goes over one carrier only");
        };
        let factor = self.operator.factor;
        let unscaled = (factor.is_some() && gets_nothing).then(|| data.as_ref().to_vec());
        let input = contribute(factor, data, input.as_ref());
        let result = carry_out(
            bytemuck::cast_slice_mut(data.as_mut()),
            bytemuck::cast_slice(input.as_ref()),
            &self.operator.combine,
        );
        if let Some(unscaled) = unscaled {
            data.as_mut().copy_from_slice(&unscaled);
        }
        result
    }
}
