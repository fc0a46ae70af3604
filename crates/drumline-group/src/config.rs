//! Every setting, in one place.

mod as_file;
mod builder;
mod debug;
#[cfg(test)]
mod tests;

pub use debug::DebugLevel;

use std::{net::IpAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use drumline_engine::{Settings, deadline};
use drumline_schedule::{Rounding, SumOrder};
use drumline_store::{
    auth::{Level, NoLevel, Secret},
    store::BYTES_MAX,
};

use crate::{Error, Result, algorithms::PriceSource, trace::Trace};

/// How a process group behaves. Build it in code, or read it from the environment once.
///
/// Each setting is a field, to be read, and a method of the same name, which sets it.
///
/// ```
/// # use drumline_group as drumline;
/// use std::time::Duration;
///
/// let config = drumline::Config::default().timeout(Duration::from_secs(60)).shared_memory(false);
/// assert_eq!(config.timeout.as_secs(), 60);
/// assert_eq!(config.all_reduce, None); // as it was
/// ```
///
/// Settings also come from a file, and go into one, by serde. They have the names of their variables there,
/// in lower case and without `DRUMLINE_`, and the same values. What the file does not mention is as by
/// default. Secrets stay out of it.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::Config;
///
/// let text = r#"{ "timeout_s": 60, "shared_memory": false, "bind_address": ["127.0.0.1"] }"#;
/// let config: Config = serde_json::from_str(text)?; // or TOML, YAML, ...
/// assert!(!config.shared_memory);
/// let error = serde_json::from_str::<Config>(r#"{ "timeout": 60 }"#).unwrap_err();
/// assert!(error.to_string().contains("there is no setting \"timeout\"; there are timeout_s"));
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// How long start-up and every collective may take. `DRUMLINE_TIMEOUT_S`, in seconds; 600 s
    /// unless set. Any duration above zero is valid: `Duration::MAX` (`inf`) means no limit.
    pub timeout: Duration,

    /// What carries operations, by name: `drumline` for the library's own transports, which is also what `auto` means,
    /// or what was registered ([`crate::backend`]); the same on all ranks. `DRUMLINE_BACKEND`; `drumline` unless set.
    pub backend: Option<String>,

    /// The MPI library that the backend `mpi` and `mpi://` load: a path. `DRUMLINE_MPI_LIBRARY`; unless set,
    /// the one that this process has loaded already, else the first that is found. A library that is loaded
    /// already wins over the path.
    pub mpi_library: Option<PathBuf>,
    /// The driver of GPUs, of CUDA or of HIP: a path. `DRUMLINE_CUDA_LIBRARY`; unless set, the one that this process
    /// has loaded already, else the first that is found.
    pub cuda_library: Option<PathBuf>,
    /// NCCL or RCCL: a path. `DRUMLINE_NCCL_LIBRARY`; unless set, found as the driver is.
    pub nccl_library: Option<PathBuf>,

    /// The algorithm of `all_reduce`, by name (`direct`, `halving`, `doubling`, `gather`,
    /// `binomial`, or one that uses shared memory), the same on all ranks. `DRUMLINE_ALL_REDUCE`;
    /// chosen by size unless set. It never changes a result.
    pub all_reduce: Option<String>,

    /// The prices by which algorithms over links are chosen, the same on all ranks. `DRUMLINE_PRICES`:
    /// `default` (unless set), `measure`, or a file. They never change a result.
    pub prices: PriceSource,

    /// The addresses to listen on for peers; the connections are spread over them.
    /// `DRUMLINE_BIND_ADDRESS`, with commas between several; unless set, the one from which this
    /// host reaches the master. Nothing listens there unless a rank is on another host.
    pub bind_addresses: Vec<IpAddr>,

    /// The network interfaces to listen on for peers, instead of `bind_addresses`: `eth,ib` for those whose names begin
    /// so, `=eth1` for exactly that one, `^docker,wlan` for the one on the way to the master or the first that is
    /// neither of these. The connections are spread over those that are named. `DRUMLINE_SOCKET_IFNAME`, which may be
    /// empty for none, else `GLOO_SOCKET_IFNAME`, in which names are exact.
    pub socket_ifname: Option<String>,

    /// The ports to listen on, for firewalls that let only some through. `DRUMLINE_PORT_RANGE`, such as
    /// `40000-40100`; any unless set. A host needs one for each of its ranks, times the groups over
    /// several hosts that these are in, times the interfaces; and two for stores of `drumline run`.
    pub port_range: Option<RangeInclusive<u16>>,

    /// How many TCP connections carry the data between two ranks, at most 16, the same on all ranks: block by block,
    /// each in its turn. Several get more of a network that limits each flow, or that spreads flows over several lines.
    /// `DRUMLINE_STREAMS`; unless set, one for each address or interface that the environment names, and else 1.
    pub streams: usize,

    /// Whether ranks of one host and user talk over Unix sockets. `DRUMLINE_UNIX_SOCKETS`, 0 or
    /// 1; 1 unless set. Without, they talk over TCP as if on several hosts: to measure or test it.
    pub unix_sockets: bool,

    /// Whether a thread may move to an emptier core where ranks outnumber the cores, for a moment and at
    /// most once a millisecond. Short calls of several ranks on a core take a fifth to a quarter less
    /// time. `DRUMLINE_SPREAD_OVER_CORES`, 0 or 1; 0 unless set, since the thread is the caller's.
    pub spread_over_cores: bool,

    /// Whether ranks of one host share memory. `DRUMLINE_SHARED_MEMORY`, 0 or 1; 1 unless set.
    /// It never changes a result.
    pub shared_memory: bool,

    /// The memory node (NUMA) that this rank is bound to: ranks of a node add among themselves first, where that
    /// keeps the order of sums. `DRUMLINE_MEMORY_NODE`, a number; unless set, the node that all cores
    /// belong to which the process may use. It never changes a result.
    pub memory_node: Option<usize>,

    /// How many bytes of its data a rank works on at a time where long data goes over sockets: it sums one
    /// window while the next one arrives. The same on all ranks. `DRUMLINE_WINDOW_BYTES`; 1 MiB unless set.
    /// It never changes a result.
    pub window_bytes: usize,

    /// How many bytes of buffers a rank may register ([`alloc_registered`]). Memory is taken when a buffer is
    /// allocated, address space at once. `DRUMLINE_REGISTERED_BYTES_MAX`; half of the host's memory unless set.
    ///
    /// [`alloc_registered`]: crate::ProcessGroup::alloc_registered
    pub registered_bytes_max: Option<usize>,

    /// How many bytes the description of one object may take
    /// ([`broadcast_object`](crate::Objects::broadcast_object) and the like). Nothing longer
    /// is sent, received or allocated. `DRUMLINE_OBJECT_BYTES_MAX`; 256 MiB unless set.
    pub object_bytes_max: usize,

    /// The order in which floating-point sums are added, the same on all ranks. `DRUMLINE_SUM_ORDER`: `rank`
    /// (unless set) or `placement`. `placement` is faster where the ranks of a host are no node of the tree
    /// of sums. Its bits depend on which rank runs on which host. `backend` lets a foreign backend add by itself
    /// where it can, as `mpi` does; its bits are not those of other backends.
    pub sum_order: SumOrder,

    /// Where sums of floats of 16 and 8 bits are rounded, the same on all ranks. `DRUMLINE_ROUNDING`: `once` (unless
    /// set), at the end; or `host`: each host also rounds the sum of its ranks, which travels to other hosts in half of
    /// the bytes or less. The bits of `host` depend on which rank runs on which host.
    pub rounding: Rounding,

    /// The time after which a waiting call logs a warning that names the late ranks. After half of that time
    /// the rank tells its peers that it waits, so that each of them can name the rank that holds up all
    /// others. `DRUMLINE_WARN_AFTER_S`, in seconds; 10 s unless set.
    pub warn_after: Duration,

    /// How much data-parallel training logs of itself, at the level `info`. `DRUMLINE_DEBUG`, else
    /// `TORCH_DISTRIBUTED_DEBUG`: `off` (unless set), `info` or `detail`.
    pub debug: DebugLevel,

    /// With how many ranks a group that forms itself anew goes on when others have died; with fewer, its calls
    /// fail. `DRUMLINE_MIN_RANKS`; unless set, half of the ranks of the job, rounded up. More than the ranks of the
    /// job counts as all of them: then nobody goes on after a death.
    pub min_ranks: Option<usize>,

    /// The secret of the job. Each process proves to the others that it knows the secret. `DRUMLINE_SECRET`
    /// or `DRUMLINE_SECRET_FILE`; `drumline run` makes a fresh one for every job.
    pub secret: Option<Secret>,

    /// How TCP connections of the job are protected once both ends have proven that they know the secret
    /// ([`Level`]); the same on all ranks. `DRUMLINE_SECURITY`: `auth` (unless set) or `tls`.
    /// For `tls` a secret must be set. The level does not apply to Unix sockets and shared
    /// memory: the kernel keeps other users out of those.
    pub security: Level,

    /// Whether this rank may meet the others through a store that other machines can reach and that asks for
    /// no secret, such as torchrun's, or that a process of another user of this host holds.
    /// `DRUMLINE_TRUST_STORE`, 0 or 1; 0 unless set. With 1, the job is only as safe as the network.
    pub trust_store: bool,

    /// The limit, in bytes, of all keys and values together in the store that this process hosts for the job,
    /// or that it opens in a file. `DRUMLINE_STORE_BYTES_MAX`; 1 GiB unless set.
    pub store_bytes_max: usize,

    /// Where each rank writes a record of what it does, with times ([`crate::trace`]). `DRUMLINE_TRACE` is
    /// the directory, and `DRUMLINE_TRACE_BYTES_MAX` the limit of each rank's file. Nothing is written unless
    /// `DRUMLINE_TRACE` is set.
    pub trace: Option<Trace>,
}

/// The limit of [`Config::streams`].
pub(crate) const STREAMS_MAX: usize = 16;

impl Default for Config {
    fn default() -> Config {
        Config {
            timeout: Duration::from_secs(600),
            backend: None,
            mpi_library: None,
            cuda_library: None,
            nccl_library: None,
            all_reduce: None,
            prices: PriceSource::Default,
            bind_addresses: Vec::new(),
            socket_ifname: None,
            port_range: None,
            streams: 1,
            unix_sockets: true,
            spread_over_cores: false,
            shared_memory: true,
            memory_node: None,
            window_bytes: 1 << 20,
            registered_bytes_max: None,
            object_bytes_max: 256 << 20,
            sum_order: SumOrder::Rank,
            rounding: Rounding::Once,
            warn_after: Duration::from_secs(10),
            debug: DebugLevel::Off,
            min_ranks: None,
            secret: None,
            security: Level::Auth,
            trust_store: false,
            store_bytes_max: BYTES_MAX,
            trace: None,
        }
    }
}

impl Config {
    /// Reads the `DRUMLINE_*` variables of the environment.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use std::time::Duration;
    ///
    /// use drumline::Config;
    ///
    /// // As the job's environment says, but for what this program knows better.
    /// let config = Config::from_env()?.timeout(Duration::from_secs(60));
    /// # let is_ours = |name: &str| name.starts_with("DRUMLINE_") || name == "GLOO_SOCKET_IFNAME";
    /// # if !std::env::vars_os().any(|(name, _)| is_ours(&name.to_string_lossy())) {
    /// assert_eq!(config.bind_addresses, Config::default().bind_addresses); // where nothing is set
    /// assert_eq!(Config::from_env()?, Config::default());
    /// # }
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Setting`](crate::ErrorKind::Setting) names the variable that cannot be understood.
    pub fn from_env() -> Result<Config> {
        let config = Config::from_variables(|name| std::env::var(name).ok())?;
        Ok(Config { secret: Secret::from_env()?, ..config })
    }

    /// How many addresses or interfaces are named to listen on; 1 if none is named. With the same number of
    /// [`streams`](Config#structfield.streams), the data uses all of them.
    pub fn named_interfaces(&self) -> usize {
        let names = match &self.socket_ifname {
            Some(names) if !names.starts_with('^') => names.split(',').count(),
            _ => 0,
        };
        names.max(self.bind_addresses.len()).clamp(1, STREAMS_MAX)
    }

    /// The settings that a lane needs.
    pub(crate) fn lane_settings(&self) -> Settings {
        let environment = Config::from_variables(|name| std::env::var(name).ok());
        Settings {
            timeout: self.timeout,
            is_own_timeout: environment.is_ok_and(|it| it.timeout != self.timeout),
            warn_after: self.warn_after,
            window_bytes: self.window_bytes,
            all_reduce: self.all_reduce.clone(),
            spread_over_cores: self.spread_over_cores,
        }
    }

    pub(crate) fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Config> {
        let mut config = Config::default();
        for (name, setting) in [
            ("DRUMLINE_TIMEOUT_S", &mut config.timeout),
            ("DRUMLINE_WARN_AFTER_S", &mut config.warn_after),
        ] {
            if let Some(text) = variable(name) {
                *setting = text
                    .parse()
                    .ok()
                    .and_then(deadline::of_seconds)
                    .filter(|limit| !limit.is_zero())
                    .ok_or_else(|| invalid(name, &text, "seconds, more than 0"))?;
            }
        }
        config.backend = variable("DRUMLINE_BACKEND").filter(|name| !name.is_empty());
        for (library, name) in [
            (&mut config.mpi_library, "DRUMLINE_MPI_LIBRARY"),
            (&mut config.cuda_library, "DRUMLINE_CUDA_LIBRARY"),
            (&mut config.nccl_library, "DRUMLINE_NCCL_LIBRARY"),
        ] {
            *library = variable(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        }
        config.all_reduce = variable("DRUMLINE_ALL_REDUCE");
        if let Some(text) = variable("DRUMLINE_PRICES") {
            let Ok(prices) = text.parse();
            config.prices = prices;
        }
        if let Some(text) = variable("DRUMLINE_BIND_ADDRESS") {
            let addresses = text.split(',').map(|address| address.trim().parse());
            config.bind_addresses = addresses
                .collect::<Result<_, _>>()
                .map_err(|_| invalid("DRUMLINE_BIND_ADDRESS", &text, "IP addresses"))?;
        }
        let ifname = variable("DRUMLINE_SOCKET_IFNAME").or_else(|| {
            let exactly = |name: &str| format!("={}", name.trim());
            let names = variable("GLOO_SOCKET_IFNAME")?;
            Some(names.split(',').map(exactly).collect::<Vec<_>>().join(","))
        });
        config.socket_ifname = ifname.filter(|names| !names.is_empty());
        if let Some(text) = variable("DRUMLINE_PORT_RANGE") {
            config.port_range = text
                .split_once('-')
                .and_then(|(first, last)| Some(first.parse().ok()?..=last.parse().ok()?))
                .filter(|range| !range.is_empty() && *range.start() > 0)
                .map(Some)
                .ok_or_else(|| {
                    invalid("DRUMLINE_PORT_RANGE", &text, "ports such as 40000-40100")
                })?;
        }
        config.streams = config.named_interfaces();
        if let Some(text) = variable("DRUMLINE_STREAMS") {
            config.streams = text
                .parse()
                .ok()
                .filter(|streams| (1..=STREAMS_MAX).contains(streams))
                .ok_or_else(|| {
                    let wanted = format!("a number of connections, 1 to {STREAMS_MAX}");
                    invalid("DRUMLINE_STREAMS", &text, &wanted)
                })?;
        }
        config.trace = variable("DRUMLINE_TRACE").filter(|dir| !dir.is_empty()).map(Trace::to);
        if let Some(text) = variable("DRUMLINE_TRACE_BYTES_MAX") {
            let bytes_max = text
                .parse()
                .map_err(|_| invalid("DRUMLINE_TRACE_BYTES_MAX", &text, "a number of bytes"))?;
            if let Some(trace) = &mut config.trace {
                trace.bytes_max = bytes_max;
            }
        }
        let bytes = |name| {
            let text = variable(name);
            let number = |text: String| {
                text.parse::<usize>().map_err(|_| invalid(name, &text, "a number of bytes"))
            };
            text.map(number).transpose()
        };
        if let Some(text) = variable("DRUMLINE_MEMORY_NODE") {
            let node =
                text.parse().map_err(|_| invalid("DRUMLINE_MEMORY_NODE", &text, "a number"))?;
            config.memory_node = Some(node);
        }
        if let Some(text) = variable("DRUMLINE_MIN_RANKS") {
            let ranks = text.parse().ok().filter(|ranks| *ranks > 0);
            let wanted = "a number of ranks, more than 0";
            config.min_ranks =
                Some(ranks.ok_or_else(|| invalid("DRUMLINE_MIN_RANKS", &text, wanted))?);
        }
        config.window_bytes = bytes("DRUMLINE_WINDOW_BYTES")?.unwrap_or(config.window_bytes);
        config.registered_bytes_max = bytes("DRUMLINE_REGISTERED_BYTES_MAX")?;
        config.object_bytes_max =
            bytes("DRUMLINE_OBJECT_BYTES_MAX")?.unwrap_or(config.object_bytes_max);
        config.store_bytes_max =
            bytes("DRUMLINE_STORE_BYTES_MAX")?.unwrap_or(config.store_bytes_max);
        if let Some(text) = variable("DRUMLINE_SUM_ORDER") {
            let (order, wanted) = (text.parse(), "rank, placement or backend");
            config.sum_order = order.map_err(|_| invalid("DRUMLINE_SUM_ORDER", &text, wanted))?;
        }
        if let Some(text) = variable("DRUMLINE_ROUNDING") {
            let rounding = text.parse();
            config.rounding =
                rounding.map_err(|_| invalid("DRUMLINE_ROUNDING", &text, "once or host"))?;
        }
        let mut debug = ["DRUMLINE_DEBUG", "TORCH_DISTRIBUTED_DEBUG"].into_iter();
        if let Some((name, text)) = debug.find_map(|name| {
            let text = variable(name).filter(|text| !text.is_empty())?;
            Some((name, text))
        }) {
            let level = text.parse();
            config.debug = level.map_err(|_| invalid(name, &text, "off, info or detail"))?;
        }
        if let Some(text) = variable("DRUMLINE_SECURITY") {
            config.security = text.parse().map_err(|problem: NoLevel| {
                Error::setting("DRUMLINE_SECURITY", format!("{text:?}: {problem}"))
            })?;
        }
        for (name, setting) in [
            ("DRUMLINE_UNIX_SOCKETS", &mut config.unix_sockets),
            ("DRUMLINE_SPREAD_OVER_CORES", &mut config.spread_over_cores),
            ("DRUMLINE_SHARED_MEMORY", &mut config.shared_memory),
            ("DRUMLINE_TRUST_STORE", &mut config.trust_store),
        ] {
            if let Some(text) = variable(name) {
                *setting = match text.as_str() {
                    "0" => false,
                    "1" => true,
                    _ => return Err(invalid(name, &text, "0 or 1")),
                };
            }
        }
        Ok(config)
    }
}

fn invalid(setting: &str, value: &str, wanted: &str) -> Error {
    Error::setting(setting, format!("{value:?} should be {wanted}"))
}
