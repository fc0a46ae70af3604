//! Predicts the time of a collective on a cluster: replays the schedules of all ranks by the cluster's
//! prices.
//!
//! A replay sends and adds nothing. Every rank takes the steps of its real schedule. A step takes the time
//! that a [`PriceList`](drumline_schedule::price::PriceList) says, and waits for the resources that it
//! shares:
//!
//! | step | takes | waits for |
//! |---|---|---|
//! | send, receive | half of `message_ps` and of `byte` at each end, `round_ps` between | the line out of the sender's host and that into the receiver's, if these are two |
//! | reduce, copy | `touch_ps` for each place, `combine`, `copy` and `slot_byte_fs` or `shared_slot_byte_fs` for each byte | the memory of the host |
//! | post | `post_ps` until a neighbour sees it | |
//!
//! A rank needs a core of its host for every step, and to continue after a wait. A rank stays on its core
//! unless another core would be free a millisecond sooner. A core takes `switch_ps` to change from one rank
//! to another. If both could run, it continues with the rank that it has. In a
//! [pipelined](drumline_schedule::Pipeline) algorithm a message counts once for each window of 1 MiB. Each
//! shared resource serves ranks in the order in which they ask. A message streams: its receiver begins when
//! the first byte arrives, and ends no earlier than the last byte arrives. The network between the hosts'
//! lines is never the bottleneck.
//!
//! Up to `cache_bytes` of the buffers that the ranks of a core work on stay in the caches. Each further byte
//! moves from or to memory, which costs the difference between `memory_fs` and `cached_fs`.
//!
//! The replay takes events in the order of time, and all times are integers. So the same question has the
//! same answer everywhere.
//!
//! ```
//! use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
//! use drumline_inspect::replay::{Cluster, Workload, replay};
//!
//! // 16 hosts of 8 ranks, lines of 25 Gb/s.
//! let prices = PriceList { nic_byte_fs: 320_000, ..PriceList::default() };
//! let cluster = Cluster { cores_per_host: 64, ..Cluster::new(Topology::hosts(&[8; 16]), prices) };
//! let time_of = |name| {
//!     let algorithm = Algorithm::find(Collective::AllReduce, name)?;
//!     let f32 = ElementKind { bytes: 4, sum_bytes: 4 };
//!     replay(&cluster, &Workload { algorithm, root: 0, elements: 1 << 24, kind: f32 })
//! };
//! // Hosts that add their own ranks first have less to send.
//! assert!(time_of("hierarchical-push")?.time_ps < time_of("halving")?.time_ps);
//! # Ok::<_, drumline_schedule::Error>(())
//! ```

mod cluster;
mod device;
mod engine;
mod hosts;
mod program;
mod run;
mod training;

pub use cluster::{Cluster, Method, Outcome, Workload};
pub use device::{DeviceOutcome, DeviceWorkload, replay_devices};
pub use run::{line_bound, replay, replay_in_a_row};
pub use training::{Training, TrainingStep};
