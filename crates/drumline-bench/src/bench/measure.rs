//! The times of one turn, and the CPU time and thread switches of an operation.

use std::time::{Duration, Instant};

use drumline::{ProcessGroup, ReduceOp, Result};
use rustix::time::{ClockId, clock_gettime};

use super::{options::Options, trial::Trial};

/// The result of one turn of a trial. All ranks have the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    /// The times on the slowest rank, in microseconds: of each operation, or the mean of each batch.
    pub(super) samples_us: Vec<f64>,
    /// The number of wrong elements on all ranks.
    pub(super) wrong: u64,
}

/// The cost of one operation for all ranks together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bill {
    /// CPU time of all ranks, in seconds.
    pub(super) cpu_s: f64,
    /// Number of thread switches.
    pub(super) switches: f64,
}

/// The number of operations of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace {
    /// Number of batches. Each batch is one sample.
    pub(super) samples: usize,
    /// Operations of each batch.
    pub(super) batch: usize,
}

const SAMPLES_MAX: usize = 10_000;
const BATCHES: usize = 20;
const BATCH_MAX: usize = 100_000;

/// How long operations run to measure a [`Bill`].
const BILLED: Duration = Duration::from_millis(20);

/// Measures on all ranks together. They meet and exchange figures in the group `control`.
pub(super) struct Meter<'a> {
    pub(super) control: &'a ProcessGroup,
    pub(super) options: &'a Options,
}

impl Meter<'_> {
    /// Runs the operation a few times, and returns how often it fits into a turn.
    pub(super) fn warm_up(&self, trial: &mut dyn Trial, turn: &mut Turn) -> Result<Pace> {
        let (mut fastest, mut fastest_call) = (Duration::MAX, Duration::MAX);
        let mut wrong = 0;
        for salt in 0..usize::from(self.options.warmup_iters).max(2) {
            let start = Instant::now();
            fastest_call = fastest_call.min(self.once(trial, salt, &mut wrong)?);
            fastest = fastest.min(start.elapsed());
        }
        turn.wrong += self.all(wrong as f64, ReduceOp::Sum)? as u64;
        let slowest = |time: Duration| self.all(time.as_secs_f64(), ReduceOp::Max);
        Ok(pace(self.options, slowest(fastest)?, slowest(fastest_call)?))
    }

    /// One turn.
    pub(super) fn turn(&self, trial: &mut dyn Trial, pace: Pace, round: usize) -> Result<Turn> {
        let mut times = Vec::with_capacity(pace.samples);
        let mut wrong = 0;
        if self.options.untouched {
            self.once(trial, round, &mut wrong)?;
            trial.clear();
            for _ in 0..pace.samples {
                self.control.barrier()?;
                times.push(trial.run(pace.batch)?.as_secs_f64() * 1e6 / pace.batch as f64);
            }
            self.once(trial, round + 1, &mut wrong)?;
        } else {
            for sample in 0..pace.samples {
                times.push(self.once(trial, round + sample, &mut wrong)?.as_secs_f64() * 1e6);
            }
        }
        self.control.all_reduce(&mut times, ReduceOp::Max)?;
        let wrong = self.all(wrong as f64, ReduceOp::Sum)? as u64;
        Ok(Turn { samples_us: times, wrong })
    }

    /// One operation on fresh inputs. It begins on all ranks at once, and its result is verified.
    fn once(&self, trial: &mut dyn Trial, salt: usize, wrong: &mut u64) -> Result<Duration> {
        trial.rewrite(salt);
        self.control.barrier()?;
        let time = trial.run(1)?;
        *wrong += trial.wrong(salt);
        Ok(time)
    }

    /// The cost of an operation that takes `time_us`: the mean of many operations in a row.
    pub(super) fn bill(&self, trial: &mut dyn Trial, time_us: f64) -> Result<Bill> {
        let count = (BILLED.as_secs_f64() * 1e6 / time_us.max(1e-3)) as usize;
        let count = count.clamp(2, BATCH_MAX);
        trial.clear();
        self.control.barrier()?;
        let before = used();
        trial.run(count)?;
        let after = used();
        let mut used = [after.0 - before.0, after.1 - before.1];
        self.control.all_reduce(&mut used, ReduceOp::Sum)?;
        let [cpu_s, switches] = used.map(|used| used.max(0.0) / count as f64);
        Ok(Bill { cpu_s, switches })
    }

    /// The values of all ranks, combined by `op`.
    pub(super) fn all(&self, value: f64, op: ReduceOp) -> Result<f64> {
        let mut value = [value];
        self.control.all_reduce(&mut value, op)?;
        Ok(value[0])
    }
}

/// How many operations fit into a turn. `cycle_s` is the time of an operation with the rewriting and
/// verifying of its buffers, `call_s` that of the call alone.
fn pace(options: &Options, cycle_s: f64, call_s: f64) -> Pace {
    let fits = |time_s: f64| (options.time.as_secs_f64() / time_s.max(1e-9)) as usize;
    match (options.untouched, options.iters) {
        (true, Some(count)) => {
            let samples = count.min(BATCHES);
            Pace { samples, batch: count / samples }
        }
        (true, None) => {
            let count = fits(call_s).max(3);
            let samples = count.min(BATCHES);
            Pace { samples, batch: (count / samples).min(BATCH_MAX) }
        }
        (false, Some(samples)) => Pace { samples, batch: 1 },
        (false, None) => Pace { samples: fits(cycle_s).clamp(3, SAMPLES_MAX), batch: 1 },
    }
}

/// The CPU seconds and the thread switches that this process has used so far.
fn used() -> (f64, f64) {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    (time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9, switches())
}

/// The thread switches of this process so far; 0 if the system does not tell.
fn switches() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of_task = |text: String| -> f64 {
        let lines = text.lines().filter_map(|line| line.split_once("ctxt_switches:"));
        lines.filter_map(|(_, count)| count.trim().parse::<f64>().ok()).sum()
    };
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok())
        .map(of_task)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::{super::options::tests::parse, *};

    /// A trial that has as many wrong elements as its salt says.
    struct Broken {
        runs: usize,
    }

    impl Trial for Broken {
        fn rewrite(&mut self, _: usize) {}
        fn clear(&mut self) {}
        fn run(&mut self, count: usize) -> Result<Duration> {
            self.runs += count;
            Ok(Duration::from_micros(count as u64))
        }
        fn wrong(&self, salt: usize) -> u64 {
            salt as u64
        }
    }

    fn turn(line: &str, ranks: usize) -> Vec<(Turn, usize)> {
        let options = parse(line).unwrap();
        let groups = drumline::rendezvous::local_world(ranks).unwrap();
        std::thread::scope(|threads| {
            let running: Vec<_> = groups
                .into_iter()
                .map(|control| {
                    let options = &options;
                    threads.spawn(move || {
                        let meter = Meter { control: &control, options };
                        let mut trial = Broken { runs: 0 };
                        let pace = pace(options, 1.0, 1.0);
                        let turn = meter.turn(&mut trial, pace, 1).unwrap();
                        (turn, trial.runs)
                    })
                })
                .collect();
            running.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn wrong_elements_of_all_operations_on_all_ranks_count() {
        for (turn, runs) in turn("--iters 3", 2) {
            assert_eq!((turn.wrong, runs), (2 * (1 + 2 + 3), 3));
            assert_eq!(turn.samples_us.len(), 3);
        }
    }

    #[test]
    fn untouched_turns_are_batches_between_two_verified_operations() {
        for (turn, runs) in turn("--iters 100 --untouched", 2) {
            assert_eq!((turn.wrong, runs), (2 * (1 + 2), 102));
            assert_eq!(turn.samples_us, vec![1.0; BATCHES]);
        }
    }

    #[test]
    fn a_turn_takes_its_time() {
        let pace = |line, cycle_s, call_s| {
            let Pace { samples, batch } = super::pace(&parse(line).unwrap(), cycle_s, call_s);
            (samples, batch)
        };
        assert_eq!(pace("--time 1s", 1e-2, 5e-3), (100, 1));
        assert_eq!(pace("--time 1s", 100.0, 99.0), (3, 1), "a median needs some");
        assert_eq!(pace("--time 1s", 1e-6, 1e-7), (SAMPLES_MAX, 1));
        assert_eq!(pace("--time 1s --untouched", 1.0, 1e-4), (BATCHES, 500));
        assert_eq!(pace("--time 1s --untouched", 9.0, 0.5), (3, 1));
        assert_eq!(pace("--iters 7 --untouched", 1.0, 1.0), (7, 1));
    }
}
