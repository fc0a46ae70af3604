//! The collectives, blocking and asynchronous, sorted by what they do.
//!
//! Functions that end in `_v` take blocks of different lengths. All of them [ask](Ask) for a call on bytes.

mod barrier;
mod exchange;
mod gather;
mod reduce;
mod scatter;

use std::marker::PhantomData;

use drumline_engine::{executor::Held, operation::Operation};
use drumline_schedule::Collective;

use super::{
    ProcessGroup,
    ask::{Ask, check_elements, check_len},
};
use crate::{Begun, Element, Error, Result, Work, WorkError, work::give_back};

impl ProcessGroup {
    #[inline]
    fn run<T: Element>(&self, ask: Ask<'_>, data: &mut [T], input: &[T]) -> Result<()> {
        self.run_on(ask, bytemuck::cast_slice_mut(data), bytemuck::cast_slice(input))
    }

    #[inline]
    fn run_on(&self, mut ask: Ask<'_>, data: &mut [u8], input: &[u8]) -> Result<()> {
        let call = self.call(&mut ask, data.len(), input.len())?;
        let mut operation = Operation::lent(call, ask.operator, data, input);
        if ask.is_staged {
            operation = operation.staged();
        }
        self.inner.run(&mut operation)
    }

    /// Begins the call in the background, unless its arguments cannot be used.
    fn submit<T, B, I>(&self, ask: Ask<'_>, buffer: B, input: I) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (promise, work) = Work::of(&self.inner, true);
        let end = |result, buffer| promise.complete(give_back(result, buffer));
        match self.hold(ask, Owned { buffer, input, end, element: PhantomData::<T> }) {
            Ok(()) => Ok(work),
            Err((error, owned)) => Err(WorkError { error, buffer: Some(owned.buffer) }),
        }
    }

    /// Begins a call on one buffer in the background that ends in `end`.
    pub(super) fn begin_then<T, B>(
        &self,
        ask: Ask<'_>,
        buffer: B,
        end: impl FnOnce(Result<()>, B) + Send + 'static,
    ) where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.begin_both_then(ask, buffer, Vec::new(), end);
    }

    /// The same with an input.
    pub(super) fn begin_both_then<T, B>(
        &self,
        ask: Ask<'_>,
        buffer: B,
        input: Vec<T>,
        end: impl FnOnce(Result<()>, B) + Send + 'static,
    ) where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let element = PhantomData::<T>;
        if let Err((error, owned)) = self.hold(ask, Owned { buffer, input, end, element }) {
            let Owned { buffer, end, .. } = *owned;
            end(Err(error), buffer);
        }
    }

    /// Begins a call in the background that holds its buffers. They come back if its arguments cannot be used.
    fn hold<O: Held>(&self, mut ask: Ask<'_>, owned: O) -> Result<(), (Error, Box<O>)> {
        // What is checked must not move any more.
        let owned = Box::new(owned);
        let (data, input) = (owned.data(), owned.input());
        let call = self
            .check(&ask, data, input)
            .and_then(|()| self.call(&mut ask, data.len(), input.len()));
        match call {
            Ok(call) => {
                self.inner.submit(Box::new(Operation::held(call, ask.operator, owned)));
                Ok(())
            }
            Err(error) => Err((error, owned)),
        }
    }

    /// Checks what the types of the caller's buffers do not say.
    fn check(&self, ask: &Ask<'_>, data: &[u8], input: &[u8]) -> Result<()> {
        ask.check_operator()?;
        check_elements(ask, data)?;
        check_elements(ask, input)?;
        let lies_apart = || self.arena().is_none_or(|arena| arena.offset_of(data).is_none());
        if ask.collective() == Collective::ReduceSlices && lies_apart() {
            let problem = "it takes registered buffers only".to_owned();
            return Err(Error::argument(ask.operation, problem));
        }
        Ok(())
    }
}

/// Calls on buffers whose types do not say what lies in them: the bytes of elements.
impl Ask<'_> {
    /// Carries the call out on the caller's thread.
    ///
    /// # Errors
    ///
    /// As for the call on elements; also for bytes that are no whole elements, or not aligned for them.
    pub fn run(self, group: &ProcessGroup, data: &mut [u8], input: &[u8]) -> Result<()> {
        group.check(&self, data, input)?;
        group.run_on(self, data, input)
    }

    /// Begins the call in the background. Gives `buffer` back.
    ///
    /// # Errors
    ///
    /// As for [`Ask::run`].
    pub fn begin<B, I>(self, group: &ProcessGroup, buffer: B, input: I) -> Begun<B>
    where
        I: AsRef<[u8]> + Send + 'static,
        B: AsMut<[u8]> + AsRef<[u8]> + Send + 'static,
    {
        group.submit(self, buffer, input)
    }

    /// [`Ask::begin`] that ends in `end`, which gets the buffer after a failure, too. It runs on the thread that drives
    /// the group, while the group is locked. So it must not wait for a call.
    pub fn begin_then<B>(
        self,
        group: &ProcessGroup,
        buffer: B,
        end: impl FnOnce(Result<()>, B) + Send + 'static,
    ) where
        B: AsMut<[u8]> + AsRef<[u8]> + Send + 'static,
    {
        group.begin_then::<u8, _>(self, buffer, end);
    }
}

/// The buffers of a call in the background, and what is done at its end.
struct Owned<T, B, I, F> {
    buffer: B,
    input: I,
    end: F,
    element: PhantomData<T>,
}

impl<T, B, I, F> Held for Owned<T, B, I, F>
where
    T: Element,
    I: AsRef<[T]> + Send + 'static,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    F: FnOnce(Result<()>, B) + Send + 'static,
{
    fn data(&self) -> &[u8] {
        bytemuck::cast_slice(self.buffer.as_ref())
    }

    fn input(&self) -> &[u8] {
        bytemuck::cast_slice(self.input.as_ref())
    }

    fn both(&mut self) -> (&mut [u8], &[u8]) {
        let Owned { buffer, input, .. } = self;
        (bytemuck::cast_slice_mut(buffer.as_mut()), bytemuck::cast_slice::<T, u8>(I::as_ref(input)))
    }

    fn end(self: Box<Self>, result: drumline_engine::Result<()>) {
        let Owned { buffer, end, .. } = *self;
        end(result, buffer);
    }
}
