//! How many hosts a job has, and where they meet.

use std::{ffi::OsString, num::NonZeroUsize};

use clap::Args;
use drumline_launch::{Hosts, Joining, Meeting};

use super::{
    host::Host,
    names::{Names, Refusal},
    rendezvous::{Address, Backend, Conf, address, conf},
};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(super) struct HostArgs {
    /// How many hosts the job has: a number, or MIN:MAX
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1", value_parser = hosts)]
    nnodes: Hosts,

    /// The number of this host, from 0: its place in the order of ranks. `static` needs it; elsewhere the hosts agree
    /// on it unless it is given, or Slurm or Kubernetes knows it
    #[arg(long, value_name = "N")]
    node_rank: Option<usize>,

    /// The first host, for `static`: a name or an address
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,

    /// A port of the first host, for `static` [default: 29500]. On one host: the port of the store for programs that
    /// run torch, on 127.0.0.1 [default: 0, a free one]
    #[arg(long, value_name = "PORT")]
    master_port: Option<u16>,

    /// Where several hosts meet; `c10d` is another name of `drumline` [default: static]
    #[arg(long, value_name = "BACKEND")]
    rdzv_backend: Option<Backend>,

    /// The first host, as `HOST[:29400]`; for `file`, the path of the file; for `etcd`, `HOST[:2379]`,...
    #[arg(long, value_name = "WHERE")]
    rdzv_endpoint: Option<String>,

    /// The name of the job, the same on all its hosts [default: `none`; on one host, a random one]
    #[arg(long, value_name = "ID", value_parser = job_id)]
    rdzv_id: Option<String>,

    /// How hosts meet: join_timeout=600, last_call_timeout=30, is_host=0|1, and for etcd protocol, cacert, cert, key,
    /// etcd_prefix
    #[arg(long, value_name = "KEY=VALUE,...", default_value = "", hide_default_value = true, value_parser = conf)]
    rdzv_conf: Conf,

    /// The name or address by which the other hosts reach this one
    #[arg(long, value_name = "HOST")]
    local_addr: Option<String>,

    /// This host alone, as without options for several hosts
    #[arg(long)]
    standalone: bool,
}

/// Where a job runs, and where its hosts meet.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) hosts: Hosts,
    pub(super) meeting: Option<Meeting>,
    pub(super) joining: Joining,
    pub(super) run_id: Option<String>,
    /// The port of torch's store that --master-port asks for.
    pub(super) master_port: Option<u16>,
    /// Its port unless that is given.
    pub(super) store_port: u16,
    /// What was given and means nothing here.
    pub(super) ignored: Vec<String>,
}

/// torch's ports.
const STATIC_PORT: u16 = 29500;
const C10D_PORT: u16 = 29400;

impl HostArgs {
    pub(super) fn place(&self, names: &Names, host: &Host<'_>) -> Result<Place, Refusal> {
        let backend = match self.rdzv_backend {
            None => Backend::Static,
            Some(Backend::Drumline) if self.rdzv_conf.is_file => Backend::File,
            Some(Backend::EtcdV2) => {
                return Err(Refusal::from(format!(
                    "{} etcd-v2: etcd 3.6 and later have no API v2; write --rdzv-backend etcd, which \
                     speaks v3",
                    names.of("rdzv-backend")
                )));
            }
            Some(given) => given,
        };
        if self.standalone {
            self.check_standalone(names)?;
        }
        self.node_rank.map_or(Ok(()), |number| self.check_number(number, names))?;
        match self.nnodes.max.get() {
            1 => self.alone(backend, names),
            _ => self.among_others(backend, names, host),
        }
    }

    fn check_number(&self, number: usize, names: &Names) -> Result<(), Refusal> {
        let max = self.nnodes.max.get();
        match number < max {
            true => Ok(()),
            false => {
                let text = format!(
                    "{} {number}: hosts have the numbers 0 to {}; --nnodes says how many there are",
                    names.of("node-rank"),
                    max - 1
                );
                Err(Refusal::of(text, ["node-rank"]))
            }
        }
    }

    fn check_standalone(&self, names: &Names) -> Result<(), Refusal> {
        let endpoint = self.rdzv_endpoint.as_deref();
        let elsewhere = |text: &&str| !address(text).is_ok_and(|address| address.is_loopback());
        let backend = self.rdzv_backend.filter(|&backend| backend != Backend::Drumline);
        let contradictions = [
            ("rdzv-backend", backend.is_some()),
            ("rdzv-endpoint", endpoint.filter(elsewhere).is_some()),
            ("nnodes", self.nnodes != Hosts::default()),
        ];
        match contradictions.iter().find(|(_, contradicts)| *contradicts) {
            None => Ok(()),
            Some((option, _)) => {
                let text = format!(
                    "{} says that this host is alone, and {} that it is not: give one of the two",
                    names.of("standalone"),
                    names.of(option)
                );
                Err(Refusal::of(text, [option, "standalone"]))
            }
        }
    }

    /// No host is waited for, whatever the endpoint is. Its port is that of torch's store, as under torchrun.
    fn alone(&self, backend: Backend, names: &Names) -> Result<Place, Refusal> {
        let endpoint = match backend {
            Backend::Static | Backend::Drumline => self.endpoint(names)?,
            _ => None,
        };
        let port = endpoint.and_then(|address| address.port).filter(|&port| port != 0);
        if let (Some(port), Some(master_port)) = (port, self.master_port)
            && port != master_port
        {
            return Err(self.differ("master-port", names));
        }
        let is_loopback = |name: &str| address(name).is_ok_and(|address| address.is_loopback());
        let of_many = [
            self.local_addr.as_ref().map(|_| "local-addr"),
            self.master_addr.as_ref().filter(|name| !is_loopback(name)).map(|_| "master-addr"),
        ];
        let of_many = of_many.into_iter().flatten().map(|option| names.of(option));
        Ok(Place {
            hosts: self.nnodes,
            meeting: None,
            joining: Joining::default(),
            run_id: self.rdzv_id.clone(),
            master_port: self.master_port,
            store_port: port.unwrap_or(0),
            ignored: self.ignored_keys(None, names).chain(of_many).collect(),
        })
    }

    fn among_others(
        &self,
        backend: Backend,
        names: &Names,
        host: &Host<'_>,
    ) -> Result<Place, Refusal> {
        let node_rank = self.node_rank.or_else(|| number_by_scheduler(host));
        let meeting = match backend {
            Backend::Static => self.fixed(node_rank, names)?,
            Backend::Drumline => {
                let Some(address) = self.endpoint(names)? else {
                    return Err(self
                        .lacks("--rdzv-endpoint HOST:29400, the first host", names)
                        .into());
                };
                let port = address.port.unwrap_or(C10D_PORT);
                self.check_master(&address.host, port, names)?;
                Meeting::Drumline { host: address.host, port: self.known_to_all(port, names)? }
            }
            Backend::File | Backend::Etcd | Backend::EtcdV2 => self.elsewhere(backend, names)?,
        };
        let Conf { join_timeout, last_call, is_first, .. } = self.rdzv_conf;
        let unless_told = Joining::default();
        Ok(Place {
            hosts: self.nnodes,
            meeting: Some(meeting),
            joining: Joining {
                node_rank,
                local_addr: self.local_addr.clone(),
                is_first: is_first.filter(|_| backend == Backend::Drumline),
                join_timeout: join_timeout.unwrap_or(unless_told.join_timeout),
                last_call: last_call.unwrap_or(unless_told.last_call),
            },
            run_id: Some(self.rdzv_id.clone().unwrap_or_else(|| "none".into())),
            master_port: None,
            store_port: 0,
            ignored: self.ignored_keys(Some(backend), names).collect(),
        })
    }

    /// The hosts, and their numbers, are known from the start.
    fn fixed(&self, node_rank: Option<usize>, names: &Names) -> Result<Meeting, Refusal> {
        if self.nnodes.min != self.nnodes.max {
            return Err(Refusal::from(format!(
                "{} {}: with --rdzv-backend static the number of hosts is fixed; write \
                 --rdzv-backend c10d --rdzv-endpoint HOST:29400",
                names.of("nnodes"),
                shown(self.nnodes)
            )));
        }
        let missing = "--master-addr HOST (or --rdzv-endpoint HOST:PORT), the first host, and \
                       --node-rank N, the number of this one from 0";
        let address = match (self.endpoint(names)?, &self.master_addr) {
            (Some(address), _) => address,
            (None, Some(name)) => match address(name) {
                Ok(address @ Address { port: None, .. }) => address,
                _ => {
                    return Err(Refusal::from(format!(
                        "{} {name} is no name and no address of a host; --master-port has the port",
                        names.of("master-addr")
                    )));
                }
            },
            (None, None) => return Err(self.lacks(missing, names).into()),
        };
        let node_rank = node_rank.ok_or_else(|| self.lacks(missing, names))?;
        self.check_number(node_rank, names)?;
        let port = address.port.or(self.master_port).unwrap_or(STATIC_PORT);
        self.check_master(&address.host, port, names)?;
        Ok(Meeting::Static { node_rank, host: address.host, port: self.known_to_all(port, names)? })
    }

    /// The hosts meet at something that is no host of the job.
    fn elsewhere(&self, backend: Backend, names: &Names) -> Result<Meeting, Refusal> {
        let master = [
            self.master_addr.as_ref().map(|_| "master-addr"),
            self.master_port.map(|_| "master-port"),
        ];
        if let Some(option) = master.into_iter().flatten().next() {
            let text = format!(
                "{} is where hosts meet with --rdzv-backend static: leave it out, or leave out {}",
                names.of(option),
                names.of("rdzv-backend")
            );
            return Err(Refusal::of(text, [option]));
        }
        let endpoint = self.rdzv_endpoint.as_deref().filter(|text| !text.trim().is_empty());
        match (backend, endpoint) {
            (Backend::File, Some(path)) => Ok(Meeting::File(path.into())),
            (Backend::File, None) => {
                Err(self.lacks("--rdzv-endpoint PATH, a file that all hosts see", names).into())
            }
            (_, Some(servers)) => {
                let etcd = self.rdzv_conf.etcd(servers);
                Ok(Meeting::Etcd(
                    etcd.map_err(|why| format!("{}: {why}", names.of("rdzv-endpoint")))?,
                ))
            }
            (_, None) => {
                Err(self.lacks("--rdzv-endpoint HOST:2379, a server of etcd", names).into())
            }
        }
    }

    fn endpoint(&self, names: &Names) -> Result<Option<Address>, String> {
        let given = self.rdzv_endpoint.as_deref().filter(|text| !text.trim().is_empty());
        let parsed = given.map(address).transpose();
        parsed.map_err(|why| format!("{}: {why}", names.of("rdzv-endpoint")))
    }

    /// If the first host is given twice, then as the same one.
    fn check_master(&self, host: &str, port: u16, names: &Names) -> Result<(), Refusal> {
        if self.master_addr.as_deref().is_some_and(|name| name.trim_matches(['[', ']']) != host) {
            return Err(self.differ("master-addr", names));
        }
        match self.master_port.is_some_and(|master_port| master_port != port) {
            true => Err(self.differ("master-port", names)),
            false => Ok(()),
        }
    }

    fn known_to_all(&self, port: u16, names: &Names) -> Result<u16, String> {
        let from = if self.rdzv_endpoint.is_some() { "rdzv-endpoint" } else { "master-port" };
        match port {
            0 => Err(format!("{}: the other hosts must know the port; give one", names.of(from))),
            _ => Ok(port),
        }
    }

    fn differ(&self, option: &'static str, names: &Names) -> Refusal {
        let text = format!(
            "{} differs from {} {}: leave one of the two out",
            names.of(option),
            names.of("rdzv-endpoint"),
            self.rdzv_endpoint.as_deref().unwrap_or_default()
        );
        Refusal::of(text, [option, "rdzv-endpoint"])
    }

    fn lacks(&self, what: &str, names: &Names) -> String {
        let backend = match &self.rdzv_backend {
            None => "--rdzv-backend static".to_owned(),
            Some(_) => names.of("rdzv-backend"),
        };
        let (nnodes, hosts) = (names.of("nnodes"), shown(self.nnodes));
        format!("{nnodes} {hosts} with {backend} needs {what}")
    }

    fn ignored_keys(
        &self,
        backend: Option<Backend>,
        names: &Names,
    ) -> impl Iterator<Item = String> {
        let option = names.of("rdzv-conf");
        self.rdzv_conf.ignored(backend).map(move |key| format!("{key} of {option}"))
    }
}

/// The number of this host, as Slurm or Kubernetes knows it.
fn number_by_scheduler(host: &Host<'_>) -> Option<usize> {
    let number = |value: Option<OsString>| value?.to_str()?.parse::<usize>().ok();
    // A batch script, which runs outside of a step, has SLURM_NODEID=0. If a step has several tasks on a host, that
    // number belongs to all of them.
    let nodes = number(host.variable("SLURM_STEP_NUM_NODES"));
    if nodes > Some(1) && nodes == number(host.variable("SLURM_STEP_NUM_TASKS")) {
        return number(host.variable("SLURM_NODEID"));
    }
    number(host.variable("JOB_COMPLETION_INDEX"))
}

/// More hosts than this are probably a typing error.
const HOSTS_MAX: usize = 4096;

/// `2` or `2:4`.
fn hosts(text: &str) -> Result<Hosts, String> {
    let number = |text: &str| {
        text.parse().ok().filter(|&hosts| hosts <= HOSTS_MAX).and_then(NonZeroUsize::new)
    };
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (number(min), number(max)) {
        (Some(min), Some(max)) if min <= max => Ok(Hosts { min, max }),
        (Some(_), Some(_)) => Err(format!("the smaller number comes first: {max}:{min}")),
        _ => Err(format!("give a number from 1 to {HOSTS_MAX}, or two of them: MIN:MAX")),
    }
}

fn shown(Hosts { min, max }: Hosts) -> String {
    if min == max { min.to_string() } else { format!("{min}:{max}") }
}

/// The name of a job is part of the name of a directory.
fn job_id(text: &str) -> Result<String, String> {
    let is_bad = |letter: char| letter == '/' || letter.is_control();
    match text.len() {
        1..=128 if !text.contains(is_bad) => Ok(text.into()),
        _ => Err("give 1 to 128 bytes without `/`".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_a_number_or_a_range() {
        let of = |text| hosts(text).map(|hosts| (hosts.min.get(), hosts.max.get()));
        assert_eq!(of("1"), Ok((1, 1)));
        assert_eq!(of("2:4"), Ok((2, 4)));
        assert_eq!(of("4:2"), Err("the smaller number comes first: 2:4".into()));
        for bad in ["", "0", "0:2", "1:", ":1", "1:2:3", "4097", "-1", "two"] {
            assert!(of(bad).unwrap_err().contains("from 1 to 4096"), "{bad}");
        }
        assert_eq!([shown(hosts("2").unwrap()), shown(hosts("2:4").unwrap())], ["2", "2:4"]);
    }

    #[test]
    fn schedulers_know_the_number_of_a_host_only_where_it_has_one_task() {
        let number = |variables: &'static [(&str, &str)]| {
            let environment = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
            };
            let root = std::path::Path::new("/nowhere");
            number_by_scheduler(&Host { environment: &environment, root, cores: None })
        };
        let step =
            &[("SLURM_NODEID", "1"), ("SLURM_STEP_NUM_NODES", "2"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert_eq!(number(step), Some(1));
        assert_eq!(number(&[("SLURM_NODEID", "0")]), None, "a batch script");
        let two_each =
            &[("SLURM_NODEID", "1"), ("SLURM_STEP_NUM_NODES", "2"), ("SLURM_STEP_NUM_TASKS", "4")];
        assert_eq!(number(two_each), None);
        let one =
            &[("SLURM_NODEID", "0"), ("SLURM_STEP_NUM_NODES", "1"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(number(one), None);
        assert_eq!(number(&[("JOB_COMPLETION_INDEX", "3")]), Some(3));
    }

    #[test]
    fn a_name_of_a_job_can_be_part_of_a_file_name() {
        assert_eq!(job_id("none"), Ok("none".into()));
        let long = "x".repeat(129);
        for bad in ["", "a/b", "a\nb", &long] {
            assert!(job_id(bad).is_err(), "{bad:?}");
        }
    }
}
