//! A collective together with its buffers.

use drumline_kernels::{Element, ReduceOp, Source, Target, narrow, widen};
use drumline_schedule::{
    Schedule,
    step::{Buffer, Loc},
};

use crate::{
    call::Call,
    executor::{Buffers, Layout, Memory, Pool},
    host::Host,
    lane::Operation,
};

/// A call on buffers that are lent (`&mut [T]`, `&[T]`) or owned.
#[derive(Debug)]
pub(crate) struct CallOn<T: Element, D, I> {
    call: Call,
    state: State<T, D, I>,
}

#[derive(Debug)]
enum State<T: Element, D, I> {
    /// Not begun, or ended.
    Idle(D, I),
    /// Works on the caller's elements.
    Exact(Buffers<T, D, I>),
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

impl<T, D, I> CallOn<T, D, I>
where
    T: Element,
    D: AsMut<[T]> + AsRef<[T]>,
    I: AsRef<[T]>,
{
    pub(crate) fn new(call: Call, data: D, input: I) -> CallOn<T, D, I> {
        CallOn { call, state: State::Idle(data, input) }
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

    fn op(&self) -> ReduceOp {
        // The operator is not looked at where nothing is reduced.
        self.call.reduce_op.unwrap_or(ReduceOp::Sum)
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
        let op = self.op();
        let state = std::mem::replace(&mut self.state, State::Empty);
        self.state = match state {
            State::Idle(data, input) if wide => {
                let widened = |elements: &[T]| {
                    let mut wide = vec![bytemuck::Zeroable::zeroed(); elements.len()];
                    widen(Target::from(&mut wide[..]), Source::from(elements));
                    wide
                };
                let (wide_data, wide_input) = (widened(data.as_ref()), widened(input.as_ref()));
                let buffers =
                    Buffers::new(schedule, layout.clone(), op, wide_data, wide_input, pool);
                let is_data = |loc: Loc| loc.buffer == Buffer::Data;
                let writes = schedule.steps.iter().any(|step| step.writes().any(is_data));
                State::Wide { buffers, data, input, writes }
            }
            State::Idle(data, input) => {
                State::Exact(Buffers::new(schedule, layout.clone(), op, data, input, pool))
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
                let (data, input) = buffers.recycle(pool);
                State::Idle(data, input)
            }
            State::Wide { buffers, mut data, input, writes } => {
                let (wide, _) = buffers.recycle(pool);
                if writes {
                    narrow(Target::from(data.as_mut()), Source::from(&wide[..]));
                }
                State::Idle(data, input)
            }
            other => other,
        };
    }
}
