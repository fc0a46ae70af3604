//! What to run, and how.

use std::{ffi::OsString, num::NonZeroUsize, path::PathBuf, time::Duration};

use drumline::{auth::Level, cores::NumaBinding};

use crate::{
    Hangs, Logs, Monitoring, Restarts, Stdin,
    supervisor::{Policy, Signal},
};

/// What to run, on how many ranks, and how to end it.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use drumline_launch::{Job, TorchStore};
///
/// let ranks = NonZeroUsize::new(2).unwrap();
/// let job = Job { arguments: vec!["--epochs".into(), "3".into()], ..Job::new("./train", ranks) };
/// assert_eq!(job.torch_store, Some(TorchStore::User { port: 0 })); // any free port
/// ```
#[derive(Clone, Debug)]
pub struct Job {
    /// The program, as one would write it in a shell.
    pub program: OsString,
    /// Its arguments. Workers get them as [`arguments_of`](crate::program::arguments_of) says.
    pub arguments: Vec<OsString>,
    /// How many workers to start on this host.
    pub nproc_per_node: NonZeroUsize,
    /// With how many ranks of all hosts the job goes on when others have died, if its program forms its groups anew:
    /// `DRUMLINE_MIN_RANKS` of the workers. `None`: as in the launcher's own environment.
    pub min_ranks: Option<NonZeroUsize>,
    /// How many hosts the job has.
    pub hosts: Hosts,
    /// Where the hosts meet. `None`: this host is alone.
    pub meeting: Option<Meeting>,
    /// How this host joins the others. A host that is alone does not look at it.
    pub joining: Joining,
    /// The name of the job, `--rdzv-id`: all its hosts must give the same one. `None`: a fresh random one, for a
    /// job of one host.
    pub run_id: Option<String>,
    /// The name of what the workers do, `ROLE_NAME`.
    pub role: String,
    /// Whether each worker believes that it is the only one of its host: `LOCAL_RANK` is 0, and it sees one
    /// device.
    pub virtual_local_rank: bool,
    /// What is written to files, and what is shown.
    pub logs: Logs,
    /// The file that says, as JSON, how the job ended on this host: `--report`.
    pub report: Option<PathBuf>,
    /// What happens after a failure.
    pub restarts: Restarts,
    /// The store for programs that use torch. `None`: there is no such store.
    pub torch_store: Option<TorchStore>,
    /// Which worker gets the stdin of the launcher: `--stdin`.
    pub stdin: Stdin,
    /// Whether lines of stdout start with their rank. Lines of stderr always do.
    pub labels_stdout: bool,
    /// Which cores each worker may use: `--numa-binding`. `None`: all.
    pub numa_binding: Option<NumaBinding>,
    /// Whether glibc registers no restartable sequences (rseq) in the workers. A `glibc.pthread.rseq` in the
    /// launcher's own `GLIBC_TUNABLES` takes precedence.
    pub disables_rseq: bool,
    /// How connections between ranks are protected: `DRUMLINE_SECURITY` of the workers. `None`: as in the
    /// launcher's own environment.
    pub security: Option<Level>,
    /// How long workers may take to end.
    pub policy: Policy,
    /// What counts as a rank that hangs.
    pub hangs: Hangs,
    /// Who hears what happens to the job.
    pub monitoring: Monitoring,
    /// What the launcher does with the signals that it gets: `--signals-to-handle`. Those of job control
    /// (Ctrl-Z) stop and continue the workers, too. Signals that are not here have the kernel's meaning.
    pub signals: Vec<(Signal, OnSignal)>,
    /// The command that runs this program again. With [`KEEP_SUBCOMMAND`](crate::KEEP_SUBCOMMAND) as
    /// its next argument it must call [`keep`](crate::keep()). Empty: the binary of this process.
    pub relaunch: Vec<OsString>,
}

impl Job {
    /// Runs `nproc_per_node` copies of `program`. Everything else has its default.
    pub fn new(program: impl Into<OsString>, nproc_per_node: NonZeroUsize) -> Job {
        Job {
            program: program.into(),
            arguments: Vec::new(),
            nproc_per_node,
            min_ranks: None,
            hosts: Hosts::default(),
            meeting: None,
            joining: Joining::default(),
            run_id: None,
            role: "default".into(),
            virtual_local_rank: false,
            logs: Logs::default(),
            report: None,
            restarts: Restarts::default(),
            torch_store: Some(TorchStore::User { port: 0 }),
            stdin: Stdin::default(),
            labels_stdout: true,
            numa_binding: None,
            disables_rseq: false,
            security: None,
            policy: Policy::default(),
            hangs: Hangs::default(),
            monitoring: Monitoring::default(),
            signals: OnSignal::UNLESS_TOLD.to_vec(),
            relaunch: Vec::new(),
        }
    }
}

/// Who may use the store for programs that use torch, which know no secret. With port 0 the system chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TorchStore {
    /// Processes of this user and of root, over loopback. On several hosts each launcher offers one, and carries what
    /// its workers say to the first host, behind the secret.
    User {
        /// A port on loopback.
        port: u16,
    },
    /// As above, but processes of all users of the host.
    Anyone {
        /// A port on loopback.
        port: u16,
    },
    /// Every process that can reach the first host: for programs that need its true address.
    Network {
        /// A port of the first host.
        port: u16,
    },
}

/// How many hosts a job needs, and how many it may have: `--nnodes MIN:MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Hosts {
    /// With fewer hosts the job waits.
    pub min: NonZeroUsize,
    /// Further hosts are spares: they wait until one is lost.
    pub max: NonZeroUsize,
}

impl Default for Hosts {
    fn default() -> Self {
        Hosts { min: NonZeroUsize::MIN, max: NonZeroUsize::MIN }
    }
}

/// Where the hosts of a job meet: `--rdzv-backend` and `--rdzv-endpoint`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// Every host knows its number and the address of the first one.
    Static {
        /// The number of this host.
        node_rank: usize,
        /// The first host: a name or an address.
        host: String,
        /// A port of the first host.
        port: u16,
    },
    /// At the first host: the one that can listen at this address.
    Drumline {
        /// The first host: a name or an address.
        host: String,
        /// A port of the first host.
        port: u16,
    },
    /// In a file that all hosts see.
    File(PathBuf),
    /// In etcd.
    Etcd(Etcd),
}

/// Where etcd is, and how it is spoken to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Etcd {
    /// URLs of its servers: `http://host:port` or `https://host:port`.
    pub servers: Vec<String>,
    /// What the keys of the job begin with. `None`: the launcher decides.
    pub prefix: Option<String>,
    /// A file with the certificates, in PEM, of those who may sign the servers' ones. `None`: those that the system
    /// trusts.
    pub ca: Option<PathBuf>,
    /// Files with the certificate of this host and with its key, in PEM, for servers that ask for one.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

/// How a host joins the others: `--rdzv-conf`, `--node-rank`, `--local-addr`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joining {
    /// The place of this host in the order of ranks: that of `--node-rank`, or of a cluster's scheduler. `None`: the
    /// hosts agree on one.
    pub node_rank: Option<usize>,
    /// The name or address by which the other hosts reach this one. `None`: chosen as ranks choose it.
    pub local_addr: Option<String>,
    /// Whether this host is the first one, at which the others meet. `None`: it is if it can listen there.
    pub is_first: Option<bool>,
    /// How long a host waits until [`Hosts::min`] hosts are there.
    pub join_timeout: Duration,
    /// How long the first [`Hosts::min`] hosts wait for further ones before they begin.
    pub last_call: Duration,
}

impl Default for Joining {
    fn default() -> Self {
        Joining {
            node_rank: None,
            local_addr: None,
            is_first: None,
            join_timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
        }
    }
}

/// What the launcher does when it gets a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSignal {
    /// It passes the signal on and ends the job.
    EndsJob,
    /// It passes the signal on, and the job goes on.
    PassedOn,
}

impl OnSignal {
    /// What it does unless it is told otherwise. Batch systems send SIGUSR1 and SIGUSR2 to announce the end.
    pub const UNLESS_TOLD: [(Signal, OnSignal); 6] = [
        (Signal::TERM, OnSignal::EndsJob),
        (Signal::INT, OnSignal::EndsJob),
        (Signal::HUP, OnSignal::EndsJob),
        (Signal::QUIT, OnSignal::EndsJob),
        (Signal::USR1, OnSignal::PassedOn),
        (Signal::USR2, OnSignal::PassedOn),
    ];
}
