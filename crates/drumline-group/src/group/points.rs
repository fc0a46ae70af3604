//! Messages from rank to rank: sends and receives.

use std::{marker::PhantomData, time::Instant};

use drumline_engine::transport::{Content, Direction, Message, Point, PointCall};
use drumline_schedule::step::Rank;

use super::ProcessGroup;
use crate::{
    Begun, Element, Error, Result, Work, WorkError,
    work::{Promise, give_back},
};

impl ProcessGroup {
    /// Sends `data` to rank `to`, which must receive it with [`ProcessGroup::recv`].
    ///
    /// Messages between two ranks with the same `tag` arrive in the order of the calls. Messages with other
    /// tags may overtake them. Sends and receives need no common order with collectives, and never wait for
    /// collectives of other threads.
    ///
    /// `send` returns when the receiver has asked for the message and all of it is on its way. So two ranks
    /// that first send to each other and then receive wait for ever, and so does a rank that sends to itself.
    /// Use [`ProcessGroup::send_async`] there. `send` copies the data once; the asynchronous form takes it by
    /// value and copies nothing.
    ///
    /// ```
    /// # use drumline_group as drumline;
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
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `to`, or when 65,536 messages to it
    /// wait already. [`Collective`](crate::Error::Collective) names both calls when type or count differ from the
    /// receiver's; otherwise it names the rank that died, left, or did not receive in time
    /// ([`Config::timeout`](crate::Config::timeout)). Then the group is poisoned, as after a failed collective.
    pub fn send<T: Element>(&self, data: &[T], to: Rank, tag: u64) -> Result<()> {
        self.send_async::<T, _>(data.to_vec(), to, tag)?.wait()?;
        Ok(())
    }

    /// [`ProcessGroup::send`] in the background. Gives the buffer back, unchanged.
    ///
    /// To make a batch of sends and receives, keep them in a list and wait for each of them afterwards, in any order:
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::{ProcessGroup, Result};
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(3)? {
    ///         threads.spawn(move || {
    ///             let (me, all) = (group.rank(), group.world_size());
    ///             let (next, before) = ((me + 1) % all, (me + all - 1) % all);
    ///             let batch = [
    ///                 group.recv_async(vec![0_u32], before, 0),
    ///                 group.send_async(vec![me as u32], next, 0),
    ///             ];
    ///             let batch: Result<Vec<Vec<u32>>> =
    ///                 batch.into_iter().map(|work| Ok(work?.wait()?)).collect();
    ///             assert_eq!(batch.unwrap(), [[before as u32], [me as u32]]);
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `to`.
    pub fn send_async<T, B>(&self, buffer: B, to: Rank, tag: u64) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let buffer = give_back(self.check_rank("send", to), buffer)?;
        Ok(self.post::<T, B, _>(Direction::Send, buffer, Some(to), tag, buffer_alone))
    }

    /// Receives into `data` the message that rank `from` sends with the same `tag`, type and number of
    /// elements; see [`ProcessGroup::send`]. After an error `data` is unchanged.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let sent = group.send_async(vec![1, 2, 3], 0, 7)?; // to itself
    /// let mut data = [0; 3];
    /// group.recv(&mut data, 0, 7)?;
    /// assert_eq!(data, [1, 2, 3]);
    /// sent.wait()?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::send`].
    pub fn recv<T: Element>(&self, data: &mut [T], from: Rank, tag: u64) -> Result<()> {
        let received = self.recv_async::<T, _>(data.to_vec(), from, tag)?.wait()?;
        data.copy_from_slice(&received);
        Ok(())
    }

    /// [`ProcessGroup::recv`] in the background.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let received = group.recv_async(vec![0; 3], 0, 7)?;
    /// group.send(&[1, 2, 3], 0, 7)?; // to itself
    /// assert_eq!(received.wait()?, [1, 2, 3]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `from`.
    pub fn recv_async<T, B>(&self, buffer: B, from: Rank, tag: u64) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let buffer = give_back(self.check_rank("recv", from), buffer)?;
        Ok(self.post::<T, B, _>(Direction::Receive, buffer, Some(from), tag, buffer_alone))
    }

    /// Receives into `data` from the rank that first sends with this tag, and returns that rank. Receives are
    /// served in the order of the calls, whether they name a rank or not.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::ProcessGroup;
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(3)? {
    ///         threads.spawn(move || match group.rank() {
    ///             0 => {
    ///                 let mut sum = 0;
    ///                 for _ in 0..2 {
    ///                     let mut square = [0_u64];
    ///                     let from = group.recv_any(&mut square, 7).unwrap();
    ///                     assert_eq!(square, [(from * from) as u64]);
    ///                     sum += square[0];
    ///                 }
    ///                 assert_eq!(sum, 5);
    ///             }
    ///             rank => group.send(&[(rank * rank) as u64], 0, 7).unwrap(),
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::send`]. If a rank leaves while others remain, that is no error. When all other
    /// ranks have left, this rank still has two seconds to send to itself; then the receive fails with
    /// [`Cause::NobodyLeft`](drumline_engine::Cause::NobodyLeft).
    pub fn recv_any<T: Element>(&self, data: &mut [T], tag: u64) -> Result<Rank> {
        let (received, from) = self.recv_any_async::<T, _>(data.to_vec(), tag)?.wait()?;
        data.copy_from_slice(&received);
        Ok(from)
    }

    /// [`ProcessGroup::recv_any`] in the background. Also returns the rank that has sent.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let received = group.recv_any_async(vec![0; 3], 7)?;
    /// group.send(&[1, 2, 3], 0, 7)?; // to itself
    /// assert_eq!(received.wait()?, (vec![1, 2, 3], 0));
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// None: every rank may send. The [`Work`] has the errors of [`ProcessGroup::recv_any`].
    pub fn recv_any_async<T, B>(&self, buffer: B, tag: u64) -> Begun<(B, Rank)>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        Ok(self.post::<T, B, _>(Direction::Receive, buffer, None, tag, |from, buffer| {
            from.map(|from| (buffer, from)).map_err(WorkError::without_buffer)
        }))
    }

    fn post<T, B, R>(
        &self,
        direction: Direction,
        buffer: B,
        peer: Option<Rank>,
        tag: u64,
        then: Then<B, R>,
    ) -> Work<R>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
        R: Send + 'static,
    {
        let content = Content::Elements { dtype: T::DTYPE, count: buffer.as_ref().len() };
        let (promise, work) = Work::of(&self.inner, false);
        let message = Owned { buffer, promise, then, element: PhantomData::<T> };
        self.post_message(PointCall { direction, peer, tag, content }, Box::new(message));
        work
    }

    /// Posts a message whose peer is a rank of the group.
    pub(super) fn post_message(&self, call: PointCall, message: Box<dyn Message>) {
        self.inner.post(Point::new(call, message, Instant::now()).within(self.timeout));
    }
}

/// Makes the caller's result from the other rank and the buffer.
type Then<B, R> = fn(Result<Rank>, B) -> Result<R, WorkError<R>>;

fn buffer_alone<B>(result: Result<Rank>, buffer: B) -> Result<B, WorkError<B>> {
    give_back(result.map(drop), buffer)
}

/// A message that owns its buffer.
struct Owned<T, B, R> {
    buffer: B,
    promise: Promise<R>,
    then: Then<B, R>,
    element: PhantomData<T>,
}

impl<T, B, R> Message for Owned<T, B, R>
where
    T: Element,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    R: Send + 'static,
{
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.buffer.as_ref())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.buffer.as_mut())
    }

    fn complete(self: Box<Self>, result: drumline_engine::Result<Rank>) {
        let Owned { buffer, promise, then, .. } = *self;
        promise.complete(then(result.map_err(Error::from), buffer));
    }
}
