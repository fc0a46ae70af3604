//! Threads that load batches ahead.
//!
//! Batch k is loaded by thread k mod n. Each batch has a channel of its own, and the consumer waits at the channels in
//! the order of k. So batches cannot overtake each other.

use std::{
    collections::VecDeque,
    io,
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use burn::data::dataset::DatasetError;

use super::source::Source;

/// The threads of a loader. They live as long as it does: a device may keep memory for each thread that uses it.
pub(super) struct Workers<O> {
    threads: Vec<Worker<O>>,
}

struct Worker<O> {
    /// `None` only while the threads are being ended.
    jobs: Option<mpsc::Sender<Job<O>>>,
    thread: Option<JoinHandle<()>>,
}

struct Job<O> {
    samples: Vec<usize>,
    /// Set when nobody waits for the result any more.
    is_cancelled: Arc<AtomicBool>,
    result: mpsc::Sender<Result<O, DatasetError>>,
}

/// The batches that an iterator has ordered from the workers.
pub(super) struct Queue<O> {
    workers: Arc<Workers<O>>,
    /// Those that have not been taken yet, in their order.
    pending: VecDeque<mpsc::Receiver<Result<O, DatasetError>>>,
    is_cancelled: Arc<AtomicBool>,
    ordered: usize,
}

impl<O: Send + 'static> Workers<O> {
    pub(super) fn start<I: 'static>(
        count: NonZeroUsize,
        source: &Arc<Source<I, O>>,
    ) -> io::Result<Arc<Self>> {
        let start = |index| {
            let (source, (jobs, inbox)) = (source.clone(), mpsc::channel::<Job<O>>());
            let name = format!("data-loader-{index}");
            let thread = thread::Builder::new().name(name).spawn(move || {
                for job in inbox {
                    if !job.is_cancelled.load(Ordering::Relaxed) {
                        // It fails only if the iterator is gone.
                        let _ = job.result.send(source.load(&job.samples));
                    }
                }
            })?;
            Ok(Worker { jobs: Some(jobs), thread: Some(thread) })
        };
        Ok(Arc::new(Self { threads: (0..count.get()).map(start).collect::<io::Result<_>>()? }))
    }
}

impl<O> Drop for Workers<O> {
    fn drop(&mut self) {
        // A thread ends when no sender is left.
        self.threads.iter_mut().for_each(|worker| drop(worker.jobs.take()));
        for worker in &mut self.threads {
            // A thread cannot panic, because loading catches panics.
            let _ = worker.thread.take().map(JoinHandle::join);
        }
    }
}

impl<O> Queue<O> {
    pub(super) fn new(workers: Arc<Workers<O>>) -> Self {
        Self { workers, pending: VecDeque::new(), is_cancelled: Arc::default(), ordered: 0 }
    }

    /// Whether another batch should be ordered: two for each thread are on their way at a time.
    pub(super) fn has_room(&self) -> bool {
        self.pending.len() < 2 * self.workers.threads.len()
    }

    /// How many batches have been ordered.
    pub(super) fn ordered(&self) -> usize {
        self.ordered
    }

    pub(super) fn order(&mut self, samples: Vec<usize>) {
        let worker = &self.workers.threads[self.ordered % self.workers.threads.len()];
        let (result, pending) = mpsc::channel();
        if let Some(jobs) = &worker.jobs {
            let is_cancelled = self.is_cancelled.clone();
            // It fails only if the thread has ended. Then the sender is dropped, which `take` notices.
            let _ = jobs.send(Job { samples, is_cancelled, result });
        }
        self.pending.push_back(pending);
        self.ordered += 1;
    }

    /// Drops what was ordered and not taken.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.workers.clone());
    }

    /// Waits for the next batch. `None` if its thread has ended, or nothing was ordered.
    pub(super) fn take(&mut self) -> Option<Result<O, DatasetError>> {
        self.pending.pop_front()?.recv().ok()
    }
}

impl<O> Drop for Queue<O> {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }
}
