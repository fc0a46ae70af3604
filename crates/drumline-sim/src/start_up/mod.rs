//! The start-up of a job: ranks meet through a store, on virtual time, before their groups begin.
//!
//! The store's real server runs here, the real client's way to wait, and the code by which real ranks
//! start up (`drumline_engine::start_up`). Other programs use the store beside them: they make
//! any calls, die in the middle of one or lose their connections, and strangers send any bytes.
//! Some start-ups fail because the store or a rank does. Then there is no job.
//!
//! A sequential model carries out every request in the order in which the server receives it. At
//! every step it is compared with the bytes that the server writes, the connections that the server
//! refuses and the data that the server keeps.

mod action;
mod bystanders;
mod client;
mod connection;
mod mesh;
mod model;
mod rank;
mod scenario;
mod script;
mod shared_state;
mod simulation;
mod store_process;
mod waiting;

pub(crate) use simulation::{run, run_undisturbed};
