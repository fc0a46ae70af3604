//! All-to-all: every rank has a block for every rank.

use drumline_schedule::{Collective, Counts};

use super::{ProcessGroup, call, call_of};
use crate::{Begun, Element, Error, Result};

impl ProcessGroup {
    /// Sends block `i` of each rank's `input` to rank `i`. `output` gets the blocks of all ranks, in order of rank.
    ///
    /// `input` and `output` have the same length on all ranks, and hold a block for each rank.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let own = [0, 1, 2].map(|to| 10 * group.rank() + to);
    /// let mut mine = [0; 3];
    /// group.all_to_all(&own.map(|value| value as u64), &mut mine).unwrap();
    /// assert_eq!(mine, [0, 10, 20].map(|value| value + group.rank() as u64));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when the lengths differ or the ranks do not divide them;
    /// otherwise as for [`ProcessGroup::all_reduce`].
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let block = self.check_exchange(input.len(), output.len())?;
        self.run(call::<T>(Collective::AllToAll, block), None, output, input)
    }

    /// [`ProcessGroup::all_to_all`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.all_to_all_async(vec![1, 2], vec![0; 2])?;
    /// assert_eq!(work.wait()?, [1, 2]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when the lengths do not fit.
    pub fn all_to_all_async<T, I, B>(&self, input: I, output: B) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let block = self.check_exchange(input.as_ref().len(), output.as_ref().len());
        self.submit(block.map(|it| call::<T>(Collective::AllToAll, it)), None, output, input)
    }

    /// [`ProcessGroup::all_to_all`] of blocks of different lengths: this rank sends
    /// `send_counts[i]` elements to rank `i` and gets `recv_counts[i]` from it.
    ///
    /// If one rank sends a number of elements to another, that rank must expect the same number. No third
    /// rank needs to know it.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// // Every rank has as many elements for rank `i` as `i` says.
    /// let mut mine = vec![0; 3 * group.rank()];
    /// let recv_counts = [group.rank(); 3];
    /// group.all_to_all_v(&[1, 2, 2], &[0, 1, 2], &mut mine, &recv_counts).unwrap();
    /// assert_eq!(mine, vec![group.rank(); 3 * group.rank()].iter().map(|&i| i as i32).collect::<Vec<_>>());
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when counts and lengths do not fit on this rank.
    /// [`Error::Collective`] names both ranks and both counts when two ranks disagree.
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        send_counts: &[usize],
        output: &mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        let counts = self.check_pairs(input.len(), send_counts, output.len(), recv_counts)?;
        self.run(call_of::<T>(Collective::AllToAll, counts), None, output, input)
    }

    /// [`ProcessGroup::all_to_all_v`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.all_to_all_v_async(vec![1, 2], &[2], vec![0; 2], &[2])?;
    /// assert_eq!(work.wait()?, [1, 2]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when counts and lengths do not fit on this rank.
    pub fn all_to_all_v_async<T, I, B>(
        &self,
        input: I,
        send_counts: &[usize],
        output: B,
        recv_counts: &[usize],
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let out = output.as_ref().len();
        let counts = self.check_pairs(input.as_ref().len(), send_counts, out, recv_counts);
        self.submit(counts.map(|it| call_of::<T>(Collective::AllToAll, it)), None, output, input)
    }

    /// The length of a block.
    fn check_exchange(&self, input: usize, output: usize) -> Result<usize> {
        self.check_len("all_to_all", "the output", output, input)?;
        let block = input / self.world_size();
        self.check_blocks("all_to_all", block, input, "an input")?;
        Ok(block)
    }

    pub(super) fn check_pairs(
        &self,
        input: usize,
        send_counts: &[usize],
        output: usize,
        recv_counts: &[usize],
    ) -> Result<Counts> {
        let operation = "all_to_all_v";
        let sent = self.borders(operation, "send_counts", send_counts)?;
        let received = self.borders(operation, "recv_counts", recv_counts)?;
        self.check_len(operation, "the input", input, sent.total())?;
        self.check_len(operation, "the output", output, received.total())?;
        let (to_self, from_self) = (send_counts[self.rank()], recv_counts[self.rank()]);
        if to_self != from_self {
            return Err(Error::InvalidArgument {
                operation,
                problem: format!(
                    "this rank sends {to_self} elements to itself but expects {from_self}"
                ),
            });
        }
        Ok(Counts::Own { sent, received })
    }
}
