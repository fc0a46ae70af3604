//! `drumline check`: tries out what works on this host.
//!
//! Two ranks call every operation over every transport and verify the results. The rest of the report
//! describes what decides the speed.

#[cfg(feature = "device")]
mod on_device;
mod operations;
mod report;
mod system;
mod try_out;

use drumline::{Config, backend};

use self::{
    report::{Column, Report, TIMEOUT},
    system::System,
    try_out::try_out,
};
use crate::{Error, Result, output::print};

/// Tries everything and prints a report, as JSON if asked for. The exit code is 1 if a part of the library
/// itself does not work. A backend that the program has registered gets a column, too.
///
/// ```
/// assert_eq!(drumline_cli::check(false)?, 0);
/// # Ok::<_, drumline_cli::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Check`] when a setting in the environment is invalid.
pub fn check(as_json: bool) -> Result<u8> {
    let mut config = Config::from_env().map_err(Error::Check)?.timeout(TIMEOUT).trace(None);
    (config.backend, config.all_reduce) = (None, None);
    let over = |transport, shared_memory, unix_sockets| {
        let config = config.clone().shared_memory(shared_memory).unix_sockets(unix_sockets);
        try_out(backend::BUILT_IN, transport, &config)
    };
    let mut columns =
        vec![over("shm", true, true), over("unix", false, true), over("tcp", false, false)];
    columns.extend(on_devices(&config));
    // Two ranks of MPI are two processes, which its launcher starts.
    let is_tried = |name: &String| *name != backend::BUILT_IN && name != "mpi";
    for name in backend::backends().into_iter().filter(is_tried) {
        columns.push(try_out(&name, "", &config.clone().backend(name.clone())));
    }
    let report = Report { system: System::look(&config), columns };
    match as_json {
        true => print(&format!("{:#}\n", report.json()))?,
        false => print(&report.to_string())?,
    }
    Ok(report.failed().into())
}

#[cfg(feature = "device")]
fn on_devices(config: &Config) -> [Column; 2] {
    use drumline::device::Wanted;
    [Wanted::Host, Wanted::Nccl].map(|way| on_device::try_on_device(config, way))
}

#[cfg(not(feature = "device"))]
fn on_devices(_config: &Config) -> [Column; 2] {
    [backend::BUILT_IN, report::NCCL].map(|carrier| {
        let why = "this program is built without the feature `device`";
        Column::on_device(carrier, "cuda", Err(why.to_owned()))
    })
}
