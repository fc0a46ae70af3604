//! A collective together with its buffers.

use std::borrow::Cow;

use drumline_kernels::{Element, Source, Target, narrow, scale, widen, with_ieee_rounding};
use drumline_schedule::{
    Collective, Schedule,
    step::{Buffer, Rank},
    tree::{Node, merges},
};

use crate::{
    Cause, ReduceOp,
    any_call::{AnyCall, OnBytes},
    call::Call,
    executor::{Buffers, Memory, Plan, Pool},
    host::Host,
    operator::{Combine, Operator, Reduce},
};

/// A call on buffers that are lent (`&mut [T]`, `&[T]`) or owned.
#[derive(Debug)]
pub struct TypedCall<T: Element, D, I> {
    call: Call,
    /// The factor by which this rank multiplies its own values.
    factor: Option<T>,
    /// The caller's buffers.
    buffers: Buffers<T, D, Contribution<T, I>>,
    /// Copies of the buffers in the wider type in which sums are kept, for algorithms in which partial sums
    /// travel. The call works on the copies, so nothing is rounded before the end.
    wide: Option<Wide<T>>,
    /// This rank's data before they were multiplied, if the call must leave them as they are.
    unscaled: Option<Vec<T>>,
    /// Whether the call uses slots even if the buffer is registered.
    staged: bool,
}

#[derive(Debug)]
struct Wide<T: Element> {
    buffers: Buffers<T::Accumulator, WideData<T>, WideData<T>>,
    /// Whether this rank gets a result.
    writes: bool,
}

type WideData<T> = Vec<<T as Element>::Accumulator>;

/// A buffer that is only read.
#[derive(Debug)]
struct Contribution<T, I> {
    callers: I,
    /// The multiples of the caller's elements. If there are any, they are read instead.
    scaled: Option<Vec<T>>,
}

impl<T, I: AsRef<[T]>> AsRef<[T]> for Contribution<T, I> {
    fn as_ref(&self) -> &[T] {
        self.scaled.as_deref().unwrap_or(self.callers.as_ref())
    }
}

/// Multiplies what this rank contributes: the input if there is one, otherwise the data, in place.
fn contribute<T, D, I>(factor: T, data: &mut D, input: &mut Contribution<T, I>)
where
    T: Element,
    D: AsMut<[T]>,
    I: AsRef<[T]>,
{
    with_ieee_rounding(|| {
        if input.callers.as_ref().is_empty() {
            return scale(Target::from(data.as_mut()), factor);
        }
        let mut scaled = input.callers.as_ref().to_vec();
        scale(Target::from(&mut scaled[..]), factor);
        input.scaled = Some(scaled);
    });
}

impl<T, D, I> TypedCall<T, D, I>
where
    T: Element,
    D: AsMut<[T]> + AsRef<[T]>,
    I: AsRef<[T]>,
{
    /// A call on these buffers, with its operator if it reduces.
    #[inline]
    pub fn new(
        mut call: Call,
        operator: Option<Operator<T>>,
        data: D,
        input: I,
    ) -> TypedCall<T, D, I> {
        call.operator = operator.as_ref().map(Operator::kind);
        // The call does not reduce, so any operator will do.
        let Operator { factor, combine } = operator.unwrap_or(ReduceOp::Sum.into());
        let input = Contribution { callers: input, scaled: None };
        let buffers = Buffers::new(combine, data, input);
        TypedCall { call, factor, buffers, wide: None, unscaled: None, staged: false }
    }

    /// The same call through slots. It serves calls where this rank's buffer is registered but the buffers of
    /// other ranks are not.
    pub fn staged(self) -> TypedCall<T, D, I> {
        TypedCall { staged: true, ..self }
    }

    /// The caller's buffer.
    pub fn into_data(self) -> D {
        self.buffers.data
    }

    /// The caller's buffer, at any stage of the call.
    pub fn data(&self) -> &D {
        &self.buffers.data
    }

    /// The caller's input buffer.
    pub fn input_mut(&mut self) -> &mut I {
        &mut self.buffers.input.callers
    }

    /// The buffer that neighbours may reach if it is registered.
    fn open_buffer(&self) -> Option<&[T]> {
        match self.call.collective.registered_buffer() {
            _ if self.staged => None,
            // Neighbours must see the multiples, which lie elsewhere.
            Buffer::Input if self.factor.is_some() => None,
            Buffer::Input => Some(self.buffers.input.callers.as_ref()),
            _ => Some(self.data().as_ref()),
        }
    }

    /// Multiplies what this rank contributes. Keeps a copy of the data if this rank gets no result.
    fn contribute(&mut self, factor: T, collective: Collective, rank: Rank, root: Rank) {
        let Buffers { data, input, .. } = &mut self.buffers;
        if gets_nothing(collective, rank, root) {
            self.unscaled = Some(data.as_ref().to_vec());
        }
        contribute(factor, data, input);
    }

    fn restore_unscaled(&mut self) {
        if self.factor.is_none() {
            return;
        }
        self.buffers.input.scaled = None;
        if let Some(unscaled) = self.unscaled.take() {
            self.buffers.data.as_mut().copy_from_slice(&unscaled);
        }
    }
}

fn widened<T: Element>(elements: &impl AsRef<[T]>) -> WideData<T> {
    let elements = elements.as_ref();
    let mut wide = vec![bytemuck::Zeroable::zeroed(); elements.len()];
    widen(Target::from(&mut wide[..]), Source::from(elements));
    wide
}

/// Whether `rank` contributes its data to a reduction and must keep it unchanged.
fn gets_nothing(collective: Collective, rank: Rank, root: Rank) -> bool {
    match collective {
        Collective::Reduce => rank != root,
        Collective::ExclusiveScan => rank == 0,
        _ => false,
    }
}

/// The elements in `bytes`: borrowed if they are aligned, otherwise copied.
fn elements<T: Element>(bytes: &[u8]) -> Cow<'_, [T]> {
    bytemuck::try_cast_slice(bytes).map(Cow::Borrowed).unwrap_or_else(|_| {
        let mut copy = vec![T::zeroed(); bytes.len() / size_of::<T>()];
        bytemuck::cast_slice_mut(&mut copy).copy_from_slice(bytes);
        Cow::Owned(copy)
    })
}

impl<T: Element> Reduce for Combine<T> {
    fn reduce(&self, inputs: &[&[u8]], output: &mut [u8], ranks: usize) -> Result<(), Cause> {
        let leaves: Vec<Node> = (0..inputs.len()).map(Node::leaf).collect();
        let Some(merges) = merges(Node::root(inputs.len()), &leaves) else {
            unreachable!("the leaves of a tree tile it");
        };
        // Bytes from elsewhere may have any alignment.
        let inputs: Vec<Cow<'_, [T]>> = inputs.iter().map(|bytes| elements(bytes)).collect();
        let srcs: Vec<Source<'_, T>> =
            inputs.iter().map(|input| Source::from(&input[..])).collect();
        let into = |result: &mut [T]| {
            with_ieee_rounding(|| self.tree(&[Target::from(result)], &srcs, &merges, Some(ranks)))
        };
        if let Ok(output) = bytemuck::try_cast_slice_mut(output) {
            return into(output);
        }
        let mut result = vec![T::zeroed(); output.len() / size_of::<T>()];
        into(&mut result)?;
        output.copy_from_slice(bytemuck::cast_slice(&result));
        Ok(())
    }
}

impl<T, D, I> AnyCall for TypedCall<T, D, I>
where
    T: Element,
    D: AsMut<[T]> + AsRef<[T]>,
    I: AsRef<[T]>,
{
    fn call(&self) -> &Call {
        &self.call
    }

    fn registered(&self, host: &Host) -> Option<u64> {
        host.arena().offset_of(self.open_buffer()?).map(|offset| offset as u64)
    }

    fn detach(&mut self, host: &Host) {
        if let Some(open) = self.open_buffer()
            && host.arena().offset_of(open).is_some()
            && let Err(error) = host.arena().detach(open)
        {
            tracing::error!(%error, "ranks that are late may still use a registered buffer");
        }
    }

    fn prepare(&mut self, plan: &Plan, pool: &mut Pool) {
        if let Some(factor) = self.factor {
            let Schedule { collective, rank, root, .. } = *plan.schedule;
            self.contribute(factor, collective, rank, root);
        }
        match self.buffers.op() {
            Combine::Builtin(op) if plan.wide => {
                let op = Combine::Builtin(*op);
                let (data, input) = (widened(&self.buffers.data), widened(&self.buffers.input));
                let mut buffers = Buffers::new(op, data, input);
                buffers.lay_out(plan, pool);
                self.wide = Some(Wide { buffers, writes: plan.writes });
            }
            _ => self.buffers.lay_out(plan, pool),
        }
    }

    fn memory(&mut self) -> &mut dyn Memory {
        match &mut self.wide {
            Some(wide) => &mut wide.buffers,
            None => &mut self.buffers,
        }
    }

    fn release(&mut self, pool: &mut Pool) {
        self.buffers.release(pool);
        if let Some(Wide { mut buffers, writes }) = self.wide.take() {
            buffers.release(pool);
            if writes {
                narrow(Target::from(self.buffers.data.as_mut()), Source::from(&buffers.data[..]));
            }
        }
        self.restore_unscaled();
    }

    fn on_bytes(&mut self, rank: Rank, carry_out: &mut OnBytes<'_>) -> Result<(), Cause> {
        let root = self.call.root.unwrap_or(0);
        if let Some(factor) = self.factor {
            self.contribute(factor, self.call.collective, rank, root);
        }
        let (op, data, input) = self.buffers.parts();
        let result = carry_out(
            bytemuck::cast_slice_mut(data.as_mut()),
            bytemuck::cast_slice(input.as_ref()),
            op,
        );
        self.restore_unscaled();
        result
    }
}
