//! Makes a plan of a rendezvous from URLs and variables.

use drumline_store::{launched::is_of_inner_job, net::Endpoint};

use super::settings::{
    Setting, all_set, invalid, parse_query, place_of, split_place, without_brackets,
};
use crate::Result;

/// What a URL and an environment ask for. Nothing is opened yet.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::rendezvous::{Plan, StoreHost, Endpoint};
///
/// let plan = Plan::parse("tcp://node-0:4000?rank=1&world_size=2", &|_| None)?;
/// let store = Endpoint::Tcp { host: "node-0".into(), port: 4000 };
/// assert_eq!(plan, Plan { store, host: StoreHost::RankZero, rank: 1, world_size: 2 });
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The address of the store. Port 0 (the system chooses) only if no other process must know it.
    pub store: Endpoint,
    /// Which process hosts the store.
    pub host: StoreHost,
    /// This process's number, in `0..world_size`.
    pub rank: usize,
    /// The number of processes in the job.
    pub world_size: usize,
}

/// Which process hosts the store of a job.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::rendezvous::{Plan, StoreHost};
///
/// let of_torchrun = |name: &str| match name {
///     "RANK" => Some("0".to_owned()),
///     "WORLD_SIZE" => Some("2".to_owned()),
///     "MASTER_ADDR" => Some("node-0".to_owned()),
///     "MASTER_PORT" => Some("29500".to_owned()),
///     "TORCHELASTIC_USE_AGENT_STORE" => Some("True".to_owned()),
///     _ => None,
/// };
/// assert_eq!(Plan::parse("env://", &of_torchrun)?.host, StoreHost::Launcher);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreHost {
    /// The process of rank 0.
    RankZero,
    /// `drumline run`. Its store asks for the secret.
    Drumline,
    /// Another launcher. Its store is torch's, which asks for no secret.
    Launcher,
}

const KNOWN: &str =
    "known are env://, tcp://, file:// and mpi://, and what register_rendezvous_handler adds";

impl Plan {
    /// The plan for `url`. `variable` looks up variables of the environment.
    ///
    /// # Errors
    ///
    /// [`Setting`](crate::ErrorKind::Setting) names everything that is missing, or the wrong
    /// part and what it should be.
    pub fn parse(url: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Plan> {
        let in_url = |problem: String| invalid(url, problem);
        let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let place = place.strip_suffix('/').unwrap_or(place);

        let from_env = |name: &str| Setting {
            name: name.into(),
            text: variable(name).filter(|text| !text.is_empty()),
        };
        let from_url = |name: &str, text: Option<&str>| Setting::of_url(url, name, text);
        let given = from_env(DRUMLINE_STORE);
        let is_asked = scheme == "env" && place.is_empty() && !is_of_inner_job(variable);
        let given = given.text.as_ref().filter(|_| is_asked);
        let given: Option<Endpoint> = match given {
            Some(text) => Some(text.parse().map_err(|problem| invalid(DRUMLINE_STORE, problem))?),
            None => None,
        };
        let (mut host, mut port, remedy) = match scheme {
            "env" if place.is_empty() => (
                from_env("MASTER_ADDR"),
                from_env("MASTER_PORT"),
                "start the program with `drumline run`, or set what is missing",
            ),
            "env" => {
                return Err(in_url(format!(
                    "env:// takes no address ({place}): MASTER_ADDR and MASTER_PORT tell it"
                )));
            }
            "tcp" => {
                let (host, port) = split_place(place).map_err(in_url)?;
                let remedy = "write tcp://host:port?rank=R&world_size=W";
                (from_url("host", host), from_url("port", port), remedy)
            }
            "" => return Err(invalid("where to meet", format!("the URL is empty; {KNOWN}"))),
            _ => {
                return Err(in_url(format!("{scheme} is not a known way to meet; {KNOWN}")));
            }
        };
        let [rank, world_size] = parse_query(query).map_err(in_url)?;
        let (rank, world_size) = match scheme {
            "env" => (
                rank.map_or_else(|| from_env("RANK"), |text| from_url("rank", Some(text))),
                world_size.map_or_else(
                    || from_env("WORLD_SIZE"),
                    |text| from_url("world_size", Some(text)),
                ),
            ),
            _ => (from_url("rank", rank), from_url("world_size", world_size)),
        };

        // Nobody has to find the only rank.
        let alone = scheme == "env" && world_size.text.as_deref() == Some("1");
        let or = |it: Option<String>, text: &str| it.or_else(|| alone.then(|| text.into()));
        (host.text, port.text) = (or(host.text, "127.0.0.1"), or(port.text, "0"));
        let settings = [&rank, &world_size, &host, &port];
        // If a store is given, host and port are not needed.
        let needed = if given.is_some() { &settings[..2] } else { &settings[..] };
        all_set(needed, remedy)?;
        let (store, store_host) = match given {
            Some(store) => (store, StoreHost::Drumline),
            None => {
                let (host, port) = (host.host()?, port.number(0, u16::MAX.into())? as u16);
                let store_host = match is_launchers(&host, port, variable) {
                    true => StoreHost::Launcher,
                    false => StoreHost::RankZero,
                };
                (Endpoint::Tcp { host, port }, store_host)
            }
        };
        let (rank, world_size) = place_of(&rank, &world_size)?;
        let plan = Plan { store, host: store_host, rank, world_size };
        let has_others = plan.world_size > 1 || plan.host != StoreHost::RankZero;
        if matches!(plan.store, Endpoint::Tcp { port: 0, .. }) && has_others {
            let problem = "0: the others cannot know which port the system would choose".into();
            return Err(invalid(&port.name, problem));
        }
        Ok(plan)
    }

    /// Whether this process hosts the store.
    pub fn hosts_store(&self) -> bool {
        self.rank == 0 && self.host == StoreHost::RankZero
    }
}

/// Whether the launcher's store is at this address. As in torch, it is used only then.
fn is_launchers(host: &str, port: u16, variable: &dyn Fn(&str) -> Option<String>) -> bool {
    let is = |name, value: &str| variable(name).as_deref().map(without_brackets) == Some(value);
    is("TORCHELASTIC_USE_AGENT_STORE", "True")
        && is("MASTER_ADDR", host)
        && is("MASTER_PORT", &port.to_string())
}

/// The variable in which `drumline run` gives the address of its store.
pub(crate) const DRUMLINE_STORE: &str = "DRUMLINE_STORE";
