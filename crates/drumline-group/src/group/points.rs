//! Messages from rank to rank: sends and receives.

use std::{marker::PhantomData, time::Instant};

use drumline_engine::transport::{Content, Direction, Message, Point, PointCall};
use drumline_schedule::step::Rank;

use super::ProcessGroup;
use crate::{
    Begun, DType, Element, Error, Result, Work, WorkError,
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
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `to`, or when 65,536 messages to it
    /// wait already. [`Collective`](crate::ErrorKind::Collective) names both calls when type or count differ from the
    /// receiver's; otherwise it names the rank that died, left, or did not receive in time
    /// ([`Config::timeout`](crate::Config::timeout)). Then the group is poisoned, as after a failed collective.
    pub fn send<T: Element>(&self, data: &[T], to: Rank, tag: u64) -> Result<()> {
        self.send_async::<T, _>(data.to_vec(), to, tag)?.wait()?;
        Ok(())
    }

    /// [`ProcessGroup::send`] in the background. Gives the buffer back, unchanged.
    ///
    /// To make a batch of sends and receives, keep them in a list and wait for each of them afterwards, in any order.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `to`.
    pub fn send_async<T, B>(&self, buffer: B, to: Rank, tag: u64) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let buffer = give_back(self.check_rank("send", to), buffer)?;
        Ok(self.post::<T, B, _>(T::DTYPE, Direction::Send, buffer, Some(to), tag, buffer_alone))
    }

    /// Receives into `data` the message that rank `from` sends with the same `tag`, type and number of
    /// elements; see [`ProcessGroup::send`]. After an error `data` is unchanged.
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
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `from`.
    pub fn recv_async<T, B>(&self, buffer: B, from: Rank, tag: u64) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let buffer = give_back(self.check_rank("recv", from), buffer)?;
        let post = Self::post::<T, B, _>;
        Ok(post(self, T::DTYPE, Direction::Receive, buffer, Some(from), tag, buffer_alone))
    }

    /// Receives into `buffer`, in the background, from the rank that first sends with this tag, and returns that rank, too.
    /// Receives are served in the order of the calls, whether they name a rank or not.
    ///
    /// # Errors
    ///
    /// None: every rank may send. The [`Work`] has those of [`ProcessGroup::recv`]. If a rank leaves while others remain, that
    /// is no error. When all other ranks have left, this rank still has two seconds to send to itself; then the receive fails
    /// with [`Cause::NobodyLeft`](drumline_engine::Cause::NobodyLeft).
    pub fn recv_any_async<T, B>(&self, buffer: B, tag: u64) -> Begun<(B, Rank)>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        Ok(self.post::<T, B, _>(T::DTYPE, Direction::Receive, buffer, None, tag, with_source))
    }

    fn post<T, B, R>(
        &self,
        dtype: DType,
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
        let count = size_of_val(buffer.as_ref()) / dtype.size();
        let content = Content::Elements { dtype, count };
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

fn with_source<B>(result: Result<Rank>, buffer: B) -> Result<(B, Rank), WorkError<(B, Rank)>> {
    result.map(|from| (buffer, from)).map_err(WorkError::without_buffer)
}

/// [`ProcessGroup::send_async`] of the bytes of elements of this type.
///
/// # Errors
///
/// As for that; also for bytes that are no whole elements.
pub fn send_bytes<B>(group: &ProcessGroup, dtype: DType, buffer: B, to: Rank, tag: u64) -> Begun<B>
where
    B: AsMut<[u8]> + AsRef<[u8]> + Send + 'static,
{
    let buffer = give_back(group.check_rank("send", to), buffer)?;
    let buffer = whole("send", dtype, buffer)?;
    Ok(group.post::<u8, B, _>(dtype, Direction::Send, buffer, Some(to), tag, buffer_alone))
}

/// [`ProcessGroup::recv_async`] of the bytes of elements of this type.
///
/// # Errors
///
/// As for that; also for bytes that are no whole elements.
pub fn recv_bytes<B>(
    group: &ProcessGroup,
    dtype: DType,
    buffer: B,
    from: Rank,
    tag: u64,
) -> Begun<B>
where
    B: AsMut<[u8]> + AsRef<[u8]> + Send + 'static,
{
    let buffer = give_back(group.check_rank("recv", from), buffer)?;
    let buffer = whole("recv", dtype, buffer)?;
    Ok(group.post::<u8, B, _>(dtype, Direction::Receive, buffer, Some(from), tag, buffer_alone))
}

/// [`ProcessGroup::recv_any_async`] of the bytes of elements of this type.
///
/// # Errors
///
/// For bytes that are no whole elements.
pub fn recv_any_bytes<B>(
    group: &ProcessGroup,
    dtype: DType,
    buffer: B,
    tag: u64,
) -> Begun<(B, Rank)>
where
    B: AsMut<[u8]> + AsRef<[u8]> + Send + 'static,
{
    let buffer = whole("recv", dtype, buffer).map_err(|it| WorkError::without_buffer(it.error))?;
    Ok(group.post::<u8, B, _>(dtype, Direction::Receive, buffer, None, tag, with_source))
}

/// Gives the buffer back, if its bytes are whole elements.
fn whole<B: AsRef<[u8]>>(
    operation: &'static str,
    dtype: DType,
    buffer: B,
) -> Result<B, WorkError<B>> {
    let (bytes, size) = (buffer.as_ref().len(), dtype.size());
    let problem =
        || format!("{bytes} bytes are no whole number of {dtype}, which take {size} bytes each");
    let fits = match bytes.is_multiple_of(size) {
        true => Ok(()),
        false => Err(Error::argument(operation, problem())),
    };
    give_back(fits, buffer)
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
        promise.complete(then(result, buffer));
    }
}
