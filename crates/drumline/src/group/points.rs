//! Messages from rank to rank.

use std::marker::PhantomData;

use drumline_schedule::step::Rank;

use super::ProcessGroup;
use crate::{
    Element, Error, Result, Work, engine,
    transport::{Direction, Message, Point, PointCall},
    work::Promise,
};

impl ProcessGroup {
    /// Sends `data` to rank `to`, which must receive it with [`ProcessGroup::recv`].
    ///
    /// Messages between two ranks that have the same `tag` arrive in the order of the calls;
    /// those with other tags may overtake them. Messages need not be called in one order with
    /// collectives and never wait for those of other threads.
    ///
    /// Returns when the receiver has asked for the message and all of it is on its way: two ranks
    /// that first send to each other and then receive wait for ever. Use
    /// [`ProcessGroup::send_async`] there. The data is copied once; the asynchronous form, which
    /// takes it by value, copies nothing.
    ///
    /// ```
    /// use drumline::ProcessGroup;
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(2)? {
    ///         threads.spawn(move || {
    ///             let mut message = [0.5_f32, 1.5];
    ///             match group.rank() {
    ///                 0 => group.send(&message, 1, 7).unwrap(),
    ///                 _ => group.recv(&mut message, 0, 7).unwrap(),
    ///             }
    ///             assert_eq!(message, [0.5, 1.5]);
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when `to` is this rank or none, or when 65,536 messages to it
    /// wait already. [`Error::Collective`] names both calls when type or count differ from the
    /// receiver's, and otherwise the rank that died, left or did not receive in time
    /// ([`Config::timeout`](crate::Config::timeout)). As after a collective, the group is poisoned
    /// then.
    pub fn send<T: Element>(&self, data: &[T], to: Rank, tag: u64) -> Result<()> {
        self.send_async::<T, _>(data.to_vec(), to, tag)?.wait().map(drop)
    }

    /// [`ProcessGroup::send`] in the background. Gives the buffer back, unchanged.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when `to` is this rank or none.
    pub fn send_async<T, B>(&self, buffer: B, to: Rank, tag: u64) -> Result<Work<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.post(Direction::Send, buffer, to, tag)
    }

    /// Receives into `data` what rank `from` sends with the same `tag`, type and number of
    /// elements; see [`ProcessGroup::send`]. After an error `data` is as it was.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::send`].
    pub fn recv<T: Element>(&self, data: &mut [T], from: Rank, tag: u64) -> Result<()> {
        let received = self.recv_async::<T, _>(data.to_vec(), from, tag)?.wait()?;
        data.copy_from_slice(&received);
        Ok(())
    }

    /// [`ProcessGroup::recv`] in the background.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when `from` is this rank or none.
    pub fn recv_async<T, B>(&self, buffer: B, from: Rank, tag: u64) -> Result<Work<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.post(Direction::Receive, buffer, from, tag)
    }

    fn post<T, B>(&self, direction: Direction, buffer: B, peer: Rank, tag: u64) -> Result<Work<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let count = buffer.as_ref().len();
        let call = PointCall { direction, peer, tag, dtype: T::DTYPE, count };
        self.check_rank(call.name(), peer)?;
        if peer == self.rank() {
            return Err(Error::InvalidArgument {
                operation: call.name(),
                problem: format!("rank {peer} is this rank itself: copy the data instead"),
            });
        }
        let (promise, work) = Work::of(&self.inner);
        match engine::get() {
            Ok(engine) => {
                let message = Box::new(Owned { buffer, promise, element: PhantomData::<T> });
                self.inner.post(engine, Point::new(call, message));
            }
            Err(error) => promise.complete(Err(error)),
        }
        Ok(work)
    }
}

/// A message that owns its buffer.
struct Owned<T, B> {
    buffer: B,
    promise: Promise<B>,
    element: PhantomData<T>,
}

impl<T, B> Message for Owned<T, B>
where
    T: Element,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
{
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.buffer.as_ref())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.buffer.as_mut())
    }

    fn complete(self: Box<Self>, result: Result<()>) {
        let Owned { buffer, promise, .. } = *self;
        promise.complete(result.map(|()| buffer));
    }
}
