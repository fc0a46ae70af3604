//! The options of `drumline bench`.

use std::{num::NonZeroUsize, path::PathBuf, str::FromStr, time::Duration};

use clap::Args;
use drumline::{DType, ReduceOp, files};

use super::{
    choice::{Buffers, CallStyle, List, Transport, list},
    operation::{Operation, Place},
};
use crate::{Error, Result};

const EXAMPLES: &str = "\
Examples:
  drumline bench                                   # all_reduce of f32, 8 B to 64 MiB, 2 ranks
  drumline bench all_gather,broadcast -b 1M -e 16M -f 16 --nproc-per-node 4
  drumline bench --transport shm,tcp --buffers staged,registered --svg speed.svg
  drumline bench -d f32,bf16 -o sum,max -b 16M -e 16M --json speed.json
  DRUMLINE_BACKEND=mpi mpiexec -n 2 drumline bench   # over MPI
  torchrun --nnodes 2 --nproc-per-node 4 --no-python drumline bench -e 256M

Before each operation the ranks rewrite their buffers, as training does, and meet in a barrier. Then
each rank times its call, and the slowest rank counts. The columns are those of nccl-tests and more:
  time           median over the rounds of each round's mean, in microseconds
  algbw          size divided by time, in GB/s
  busbw          algbw times 2(n-1)/n for all_reduce and so on, in GB/s
  #wrong         elements that differ from the known answer, in all operations on all ranks
  p50, p99       quantiles of all single operations
  spread         difference of the slowest and the fastest round
  bound          busbw as a share of a copy by all ranks at once, or of a plain stream both ways
  cpu            seconds that the cores of all ranks work for a GB
  switches       switches between threads on all ranks, in one operation
  hand-over      time of one word from the core of rank 0 to the core of rank 1, before and after
A size is the size of the longest buffer of a rank.";

/// Time collectives, and verify every result
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    /// What to time, with commas between several, or `all`
    #[arg(value_name = "OPERATIONS", default_value = "all_reduce", value_parser = list::<Operation>)]
    pub(super) operations: List<Operation>,

    /// How many ranks to start; under a launcher the ranks are there already
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value = "2", value_parser = ranks)]
    pub(super) nproc_per_node: NonZeroUsize,

    /// The smallest size: 8, 64K, 16M, 1G
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "8", value_parser = bytes)]
    pub(super) min_bytes: usize,

    /// The largest size
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "64M", value_parser = bytes)]
    pub(super) max_bytes: usize,

    /// The factor from one size to the next
    #[arg(short = 'f', long, value_name = "FACTOR", default_value = "8", value_parser = factor)]
    pub(super) step_factor: usize,

    /// Exactly these sizes, with commas between them
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        value_parser = bytes,
        conflicts_with_all = ["min_bytes", "max_bytes", "step_factor"]
    )]
    pub(super) sizes: Vec<usize>,

    /// Element types, or `all`
    #[arg(short = 'd', long, value_name = "TYPES", default_value = "f32", value_parser = list::<DType>)]
    pub(super) datatype: List<DType>,

    /// Reduce operators, or `all`
    #[arg(short = 'o', long = "redop", value_name = "OPS", default_value = "sum", value_parser = list::<ReduceOp>)]
    pub(super) operator: List<ReduceOp>,

    /// The root of operations that have one
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0)]
    pub(super) root: usize,

    /// `out` of place, `in` place, or `all`; each operation has one or both
    #[arg(long, value_name = "PLACES", default_value = "all", value_parser = list::<Place>)]
    pub(super) place: List<Place>,

    /// What carries the data: `shm`, `unix`, `tcp`, or `all`; `auto`: what the settings say
    #[arg(long, value_name = "TRANSPORTS", default_value = "auto", value_parser = list::<Transport>)]
    pub(super) transport: List<Transport>,

    /// `staged`: ordinary memory; `registered`: memory of alloc_registered; or `all`
    #[arg(long, value_name = "KINDS", default_value = "staged", value_parser = list::<Buffers>)]
    pub(super) buffers: List<Buffers>,

    /// `blocking` or `async` calls, or `all`
    #[arg(long, value_name = "CALLS", default_value = "blocking", value_parser = list::<CallStyle>)]
    pub(super) calls: List<CallStyle>,

    /// Rounds; in each round every case of a size (transport, place, type, operator) takes a turn
    #[arg(long, value_name = "N", default_value = "3", value_parser = rounds)]
    pub(super) rounds: usize,

    /// Operations per round, instead of as many as fit into --time
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "time", value_parser = iterations)]
    pub(super) iters: Option<usize>,

    /// The length of each turn, rewriting and verifying included
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = turn)]
    pub(super) time: Duration,

    /// Operations before the first one that is timed
    #[arg(short = 'w', long, value_name = "N", default_value_t = 5)]
    pub(super) warmup_iters: u16,

    /// Leave buffers as they are and call again at once, as IMB does: only the first and the last
    /// operation of a turn are verified, and a sample is the mean of many operations
    #[arg(long)]
    pub(super) untouched: bool,

    /// Say which algorithm was taken, why, and what the others would have cost
    #[arg(long)]
    pub(super) explain: bool,

    /// Write everything to this file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,

    /// Draw bus bandwidth over size in this file
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
}

impl Options {
    /// How many ranks to start where no launcher has started them.
    pub fn ranks(&self) -> NonZeroUsize {
        self.nproc_per_node
    }

    /// Checks the options before the [`ranks`](Self::ranks) are started, and whether the files can be written that
    /// [`measure`](crate::measure) will write.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] says what cannot be measured, or which file cannot be written.
    pub fn prepare(&self) -> Result<()> {
        self.check(self.nproc_per_node.get())?;
        self.check_files()
    }

    /// A file that cannot be written is reported before minutes of measuring.
    pub(super) fn check_files(&self) -> Result<()> {
        self.json.iter().chain(&self.svg).try_for_each(|path| {
            let problem = |error| Error::Usage(format!("cannot write {}: {error}", path.display()));
            files::check_place(path).map_err(problem)
        })
    }

    /// Checks the options against the number of ranks, and against each other.
    pub(super) fn check(&self, world_size: usize) -> Result<()> {
        let problem = |text: String| Err(Error::Usage(text));
        if self.min_bytes > self.max_bytes {
            let (low, high) = (self.min_bytes, self.max_bytes);
            return problem(format!("--min-bytes {low} is more than --max-bytes {high}"));
        }
        if self.root >= world_size {
            return problem(format!("--root {}: there are {world_size} ranks, from 0", self.root));
        }
        let has = |operation| self.operations.items.contains(&operation);
        if world_size == 1 && has(Operation::SendRecv) && !self.operations.is_all {
            return problem("sendrecv needs two ranks: --nproc-per-node 2".to_owned());
        }
        if self.operators().next().is_none() {
            let (operators, types) = (&self.operator, &self.datatype);
            return problem(format!("no operator of {operators} is one of {types}"));
        }
        for (&operator, &dtype) in self.pairs() {
            if !operator.supports(dtype) && !self.operator.is_all && !self.datatype.is_all {
                let all = ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype));
                let names = all.map(ReduceOp::name).collect::<Vec<_>>().join(", ");
                return problem(format!("{dtype} has no operator {operator}, but {names}"));
            }
        }
        let places = |operation: &&Operation| {
            operation.places().iter().any(|place| self.place.items.contains(place))
        };
        match self.operations.items.iter().find(|operation| !places(operation)) {
            Some(operation) if !self.operations.is_all => {
                let has: Vec<_> = operation.places().iter().map(Place::to_string).collect();
                problem(format!("{operation} has no place {}, but {}", self.place, has.join(", ")))
            }
            _ => Ok(()),
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (&ReduceOp, &DType)> {
        let types = &self.datatype.items;
        self.operator
            .items
            .iter()
            .flat_map(move |operator| types.iter().map(move |it| (operator, it)))
    }

    /// Every operator with every type that has it.
    pub(super) fn operators(&self) -> impl Iterator<Item = (ReduceOp, DType)> {
        self.pairs()
            .map(|(&operator, &dtype)| (operator, dtype))
            .filter(|(op, it)| op.supports(*it))
    }

    /// The sizes in bytes: those listed by the user, else from the smallest to the largest.
    pub(super) fn sizes(&self) -> Vec<usize> {
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let next = |bytes: &usize| bytes.checked_mul(self.step_factor);
        let all = std::iter::successors(Some(self.min_bytes), next);
        all.take_while(|&bytes| bytes <= self.max_bytes).collect()
    }
}

/// A larger value is a typing error.
const BYTES_MAX: usize = 1 << 36;
const RANKS_MAX: usize = 4096;

/// `8`, `64K`, `16M`, `1G`: powers of 1024, up to 64 GiB.
fn bytes(text: &str) -> Result<usize, String> {
    let upper = text.to_ascii_uppercase();
    let digits = upper.trim_end_matches("IB").trim_end_matches('B');
    let (digits, shift) = match digits.char_indices().last() {
        Some((at, 'K')) => (&digits[..at], 10),
        Some((at, 'M')) => (&digits[..at], 20),
        Some((at, 'G')) => (&digits[..at], 30),
        _ => (digits, 0),
    };
    let number = usize::from_str(digits).ok().and_then(|number| number.checked_mul(1 << shift));
    number
        .filter(|number| (1..=BYTES_MAX).contains(number))
        .ok_or_else(|| "give bytes like 8, 64K, 16M or 1G, at most 64G".to_owned())
}

fn within(text: &str, low: usize, high: usize) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (low..=high).contains(number));
    number.ok_or_else(|| format!("give a number from {low} to {high}"))
}

fn ranks(text: &str) -> Result<NonZeroUsize, String> {
    within(text, 1, RANKS_MAX).map(|number| NonZeroUsize::new(number).unwrap_or(NonZeroUsize::MIN))
}

fn factor(text: &str) -> Result<usize, String> {
    within(text, 2, 1 << 20)
}

fn rounds(text: &str) -> Result<usize, String> {
    within(text, 1, 1000)
}

fn iterations(text: &str) -> Result<usize, String> {
    within(text, 1, 1_000_000)
}

fn turn(text: &str) -> Result<Duration, String> {
    let unit = |suffix, unit: f64| Some(text.strip_suffix(suffix)?.parse::<f64>().ok()? * unit);
    let seconds = unit("ms", 1e-3).or_else(|| unit("s", 1.0)).or_else(|| text.parse().ok());
    seconds
        .filter(|seconds| (1e-3..=600.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give a time like 100ms or 2s, from 1 ms to 10 minutes".to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::*;
    use crate::bench::choice::Choice;

    #[derive(Parser)]
    struct TestArguments {
        #[command(flatten)]
        options: Options,
    }

    pub(in super::super) fn parse(line: &str) -> Result<Options, String> {
        let arguments = TestArguments::try_parse_from(format!("bench {line}").split_whitespace());
        let options = arguments.map_err(|error| error.to_string())?.options;
        options.check(options.nproc_per_node.get()).map_err(|error| error.to_string())?;
        Ok(options)
    }

    #[test]
    fn without_options_it_is_all_reduce_of_f32_between_two() {
        let options = parse("").unwrap();
        assert_eq!(options.operations.items, [Operation::AllReduce]);
        assert_eq!(options.operators().collect::<Vec<_>>(), [(ReduceOp::Sum, DType::F32)]);
        assert_eq!(options.nproc_per_node.get(), 2);
        let sizes = options.sizes();
        assert_eq!((sizes[0], sizes[1], sizes.len()), (8, 64, 8));
    }

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, size) in [("8", 8), ("64K", 65_536), ("16M", 1 << 24), ("1gib", 1 << 30)] {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        let options = parse("-b 1K -e 5K -f 2").unwrap();
        assert_eq!(options.sizes(), [1024, 2048, 4096]);
        assert_eq!(parse("--sizes 1M,8").unwrap().sizes(), [1 << 20, 8]);
    }

    #[test]
    fn lists_are_named_or_all() {
        let options = parse("all -d bf16,f32,bf16 -o all --transport auto,tcp").unwrap();
        assert_eq!(options.operations.items, Operation::ALL);
        assert_eq!(options.datatype.items, [DType::Bf16, DType::F32]);
        assert_eq!(options.transport.items, [Transport::Auto, Transport::Tcp]);
        assert_eq!(options.operators().count(), 10, "neither has operators on bits");
    }

    #[test]
    fn what_makes_no_sense_is_explained() {
        for (line, part) in [
            ("all_reduse", "all_reduce, "),
            ("-d float", "f32, "),
            ("-o sum,mean", "\"mean\" is none of sum, avg"),
            ("-b 0", "64K"),
            ("-b 1T", "at most 64G"),
            ("-b 2K -e 1K", "--min-bytes 2048 is more than --max-bytes 1024"),
            ("-f 1", "from 2"),
            ("-b 8 --sizes 8", "cannot be used with"),
            ("-r 2", "there are 2 ranks"),
            ("--nproc-per-node 0", "from 1 to 4096"),
            ("-d f32,u8 -o band", "f32 has no operator band, but sum"),
            ("-d f32 -o band,bor", "no operator of band,bor is one of f32"),
            ("broadcast --place out", "broadcast has no place out, but in"),
            ("sendrecv --nproc-per-node 1", "needs two ranks"),
            ("--iters 5 --time 1s", "cannot be used with"),
            ("--time 5h", "from 1 ms"),
            ("--rounds 0", "from 1 to 1000"),
            ("--transport rdma", "auto, shm, unix, tcp, all"),
        ] {
            let error = parse(line).map(|_| ()).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
