//! The ranks of this host.

use std::num::NonZeroUsize;

use clap::Args;
use drumline_launch::{NumaBinding, devices};

use super::{
    host::Host,
    names::{Names, Refusal},
    rseq::Rseq,
};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(super) struct RankArgs {
    /// How many ranks to start on this host: a number; `gpu` or `xpu`: one per device; `cpu`: one per usable core;
    /// `auto`: one per device, or per core if there are no devices
    #[arg(long, value_name = "N", default_value = "1", value_parser = ranks)]
    nproc_per_node: Ranks,

    /// With how many ranks of all hosts the job goes on when others have died, if its program forms its groups anew:
    /// DRUMLINE_MIN_RANKS in their environment [default: half of the ranks]
    #[arg(long, value_name = "N")]
    min_ranks: Option<usize>,

    /// The name of what the ranks do: ROLE_NAME in their environment
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(super) role: String,

    /// Give each rank LOCAL_RANK=0 and one visible device
    #[arg(long)]
    pub(super) virtual_local_rank: bool,

    /// Bind every rank to cores near its device; without devices, local ranks in blocks
    #[arg(long, value_name = "POLICY")]
    numa_binding: Option<Binding>,

    #[command(flatten)]
    pub(super) rseq: Rseq,
}

/// How many ranks a host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranks {
    Given(NonZeroUsize),
    Auto,
    PerCore,
    PerGpu,
    PerXpu,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Binding {
    /// Each rank to one memory node
    Node,
    /// Each rank to one processor
    Socket,
    /// Each rank to its share of a memory node, alone
    Exclusive,
    /// Each rank to cores with a common cache
    CoreComplex,
}

impl RankArgs {
    pub(super) fn ranks(&self, names: &Names, host: &Host<'_>) -> Result<NonZeroUsize, String> {
        let gpus = || NonZeroUsize::new(devices::gpus(host.root, host.environment));
        let xpus = || NonZeroUsize::new(devices::xpus(host.root));
        let (count, what) = match self.nproc_per_node {
            Ranks::Given(ranks) => return Ok(ranks),
            Ranks::PerCore => (host.cores, "known number of cores"),
            Ranks::PerGpu => (gpus(), "GPU, or CUDA_VISIBLE_DEVICES and the like hide it"),
            Ranks::PerXpu => (xpus(), "discrete GPU of Intel"),
            Ranks::Auto => (gpus().or_else(xpus).or(host.cores), "known number of cores"),
        };
        let option = names.of("nproc-per-node");
        let count =
            count.ok_or_else(|| format!("{option}: this host has no {what}; give a number"))?;
        tracing::info!("{option}: this host gets {count} ranks");
        Ok(count)
    }

    /// With how many ranks the job goes on; `ranks` is how many it has, if it is known before the hosts meet.
    pub(super) fn min_ranks(
        &self,
        ranks: Option<NonZeroUsize>,
        names: &Names,
    ) -> Result<Option<NonZeroUsize>, Refusal> {
        let Some(given) = self.min_ranks else { return Ok(None) };
        let min = NonZeroUsize::new(given).filter(|min| ranks.is_none_or(|ranks| *min <= ranks));
        min.map(Some).ok_or_else(|| {
            let most =
                ranks.map_or_else(String::new, |it| format!(" to {it}, the ranks of this job"));
            let option = names.of("min-ranks");
            let text = format!("{option}: {given} should be a number from 1{most}");
            Refusal::of(text, ["min-ranks"])
        })
    }

    pub(super) fn binding(&self) -> Option<NumaBinding> {
        self.numa_binding.map(|binding| match binding {
            Binding::Node => NumaBinding::Node,
            Binding::Socket => NumaBinding::Socket,
            Binding::Exclusive => NumaBinding::Exclusive,
            Binding::CoreComplex => NumaBinding::CoreComplex,
        })
    }
}

/// More ranks than this on one host are probably a typing error.
pub(super) const RANKS_MAX: usize = 4096;

fn ranks(text: &str) -> Result<Ranks, String> {
    match text {
        "auto" => Ok(Ranks::Auto),
        "cpu" => Ok(Ranks::PerCore),
        "gpu" => Ok(Ranks::PerGpu),
        "xpu" => Ok(Ranks::PerXpu),
        number => match number.parse() {
            Ok(ranks) if ranks <= RANKS_MAX => NonZeroUsize::new(ranks),
            _ => None,
        }
        .map(Ranks::Given)
        .ok_or_else(|| {
            format!("give a number from 1 to {RANKS_MAX}, `auto`, `cpu`, `gpu` or `xpu`")
        }),
    }
}
