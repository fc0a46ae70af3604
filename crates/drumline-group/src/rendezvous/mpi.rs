//! Ranks that MPI has started: they meet in MPI's world, and rank 0 hosts their store.

use std::{net::IpAddr, ops::Range, time::Instant};

use drumline_engine::deadline::after;
use drumline_mpi::{Communicator, Mpi, Patience, Request, World};
use drumline_store::{
    auth::{Nonce, Secret},
    net::{Endpoint, call::reach, free_port},
};

use super::{
    place::Rendezvous,
    plan::{Plan, StoreHost},
    settings::invalid,
};
use crate::{Config, Error, Result, addresses::own_addresses, transport::mesh};

/// What rank 0 tells the others: where the store is, and the secret of the job.
const WORD_BYTES: usize = 1024;

/// Meets the ranks of `mpi://`.
pub(super) fn meet(url: &str, config: &Config) -> Result<Rendezvous> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    if !rest.trim_matches('/').is_empty() {
        let problem = format!("mpi:// takes nothing ({rest}): MPI knows the ranks");
        return Err(invalid(url, problem));
    }
    let failed = |error: drumline_mpi::Error| invalid(url, error.to_string());
    let world = Mpi::load(config.mpi_library.as_deref()).and_then(Mpi::init).map_err(failed)?;
    let deadline = after(Instant::now(), config.timeout);
    let everybody = Everybody::of(world, deadline)?;
    let (endpoint, secret) = everybody.agree(config)?;
    let plan = Plan {
        store: endpoint,
        host: StoreHost::RankZero,
        rank: world.rank(),
        world_size: world.size(),
    };
    plan.meet(&Config { secret: Some(secret), ..config.clone() })
}

/// All ranks of MPI's world.
struct Everybody {
    world: World,
    communicator: Communicator,
    deadline: Instant,
}

impl Everybody {
    fn of(world: World, deadline: Instant) -> Result<Everybody> {
        let failed = |error: drumline_mpi::Error| invalid("mpi://", error.to_string());
        let all: Vec<usize> = (0..world.size()).collect();
        let mut making = world.communicator(&all, TAG).map_err(failed)?;
        let communicator = until(deadline, || making.poll())?;
        Ok(Everybody { world, communicator, deadline })
    }

    /// Agrees on a store and a secret. The settings of rank 0 count.
    fn agree(&self, config: &Config) -> Result<(Endpoint, Secret)> {
        let are_neighbours = self.all_on_one_host()?;
        let told = match self.world.rank() {
            0 => Some(propose(are_neighbours, config)),
            _ => None,
        };
        // The others must hear of a failure, too.
        let word = match &told {
            Some(Ok((endpoint, secret))) => Word::Meet(endpoint, secret.expose()).encode(),
            Some(Err(error)) => Word::Failed(&error.to_string()).encode(),
            None => Vec::new(),
        };
        let mut buffer = vec![0; WORD_BYTES];
        buffer[..word.len()].copy_from_slice(&word);
        let came = self.over(self.communicator.broadcast(buffer, WORD_BYTES, 0))?;
        match told {
            Some(told) => told,
            None => read(&came),
        }
    }

    /// Whether all ranks reach a socket of the first one. Hosts that are copies of one virtual machine tell the same
    /// name.
    fn all_on_one_host(&self) -> Result<bool> {
        const NAME_BYTES: usize = 108;
        let (rank, size) = (self.world.rank(), self.world.size());
        // The others must hear of a failure, too: then no rank reaches it.
        let own = if rank == 0 { mesh::listen_on_unix(0).ok() } else { None };
        let mut name = own.as_ref().map_or_else(Vec::new, |(name, _)| name.clone().into_bytes());
        name.resize(NAME_BYTES, 0);
        let name = self.over(self.communicator.broadcast(name, NAME_BYTES, 0))?;
        let name = String::from_utf8_lossy(&name);
        let name = name.trim_end_matches('\0');
        let mut all = vec![0; size];
        all[rank] = u8::from(!name.is_empty() && matches!(reach(name), Ok(Some(_))));
        let blocks: Vec<Range<usize>> = (0..size).map(|rank| rank..rank + 1).collect();
        Ok(self.over(self.communicator.all_gather(all, &blocks))?.iter().all(|it| *it == 1))
    }

    fn over(&self, request: std::result::Result<Request, drumline_mpi::Error>) -> Result<Vec<u8>> {
        let failed = |error: drumline_mpi::Error| invalid("mpi://", error.to_string());
        let mut request = request.map_err(failed)?;
        until(self.deadline, || request.poll().map(|over| over.then_some(())))?;
        Ok(request.finish().1)
    }
}

/// Asks MPI until it has an answer. There is no guard yet that could name those who are late.
fn until<T>(
    deadline: Instant,
    mut ask: impl FnMut() -> std::result::Result<Option<T>, drumline_mpi::Error>,
) -> Result<T> {
    let mut patience = Patience::new();
    while Instant::now() < deadline {
        match ask().map_err(|error| invalid("mpi://", error.to_string()))? {
            Some(answer) => return Ok(answer),
            None => patience.pause(),
        }
    }
    let problem = "not all ranks of MPI's world have come in time (DRUMLINE_TIMEOUT_S)";
    Err(invalid("mpi://", problem.to_owned()))
}

/// For `MPI_Comm_create_group`. Groups have others.
const TAG: u16 = 0x7fff;

/// Where rank 0 will host the store, and a secret. On one host no port listens.
fn propose(are_neighbours: bool, config: &Config) -> Result<(Endpoint, Secret)> {
    let secret = match &config.secret {
        Some(secret) => secret.clone(),
        None => Secret::random()?,
    };
    if are_neighbours {
        return Ok((Endpoint::Unix(format!("drumline-mpi-{}", Nonce::name()?)), secret));
    }
    let addresses = own_addresses(config, None)?;
    let is_told = |address: &&IpAddr| !address.is_loopback() || !config.bind_addresses.is_empty();
    let address = addresses.iter().find(is_told).copied().ok_or_else(|| {
        invalid("DRUMLINE_BIND_ADDRESS", "no address at which other hosts reach rank 0".to_owned())
    })?;
    let ports = config.port_range.clone().unwrap_or(0..=0);
    let free = ports.into_iter().find_map(|port| free_port(address, port).ok());
    let port = free.ok_or_else(|| {
        Error::setting("DRUMLINE_PORT_RANGE", format!("no port of {address} is free for the store"))
    })?;
    Ok((Endpoint::Tcp { host: address.to_string(), port }, secret))
}

enum Word<'a> {
    Meet(&'a Endpoint, &'a [u8]),
    Failed(&'a str),
}

impl Word<'_> {
    /// A kind, two lengths, and two texts.
    fn encode(&self) -> Vec<u8> {
        let endpoint;
        let (kind, first, second): (u8, &[u8], &[u8]) = match self {
            Word::Meet(at, secret) => {
                endpoint = at.to_string();
                (0, endpoint.as_bytes(), secret)
            }
            Word::Failed(text) => (1, text.as_bytes(), &[]),
        };
        let room = WORD_BYTES - 5 - second.len().min(WORD_BYTES / 2);
        let first = &first[..first.len().min(room)];
        let lens = [first.len() as u16, second.len() as u16];
        let lens: Vec<u8> = lens.iter().flat_map(|len| len.to_le_bytes()).collect();
        [&[kind][..], &lens, first, second].concat()
    }
}

fn read(word: &[u8]) -> Result<(Endpoint, Secret)> {
    let broken = || invalid("mpi://", "what rank 0 tells makes no sense".to_owned());
    let &[kind, a, b, c, d, ref rest @ ..] = word else { return Err(broken()) };
    let (first, second) = (u16::from_le_bytes([a, b]).into(), u16::from_le_bytes([c, d]).into());
    let (first, rest) = rest.split_at_checked(first).ok_or_else(broken)?;
    let second = rest.get(..second).ok_or_else(broken)?;
    let text = String::from_utf8_lossy(first);
    match kind {
        0 => {
            let endpoint = text.parse().map_err(|problem| invalid("mpi://", problem))?;
            Ok((endpoint, Secret::new(second)?))
        }
        _ => Err(invalid("mpi://", format!("rank 0 cannot host the store: {text}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_tells_the_store_and_the_secret() {
        let secret = Secret::random().unwrap();
        for endpoint in ["unix:@drumline-mpi-0", "tcp://[fd00::1]:29500"] {
            let endpoint: Endpoint = endpoint.parse().unwrap();
            let mut word = Word::Meet(&endpoint, secret.expose()).encode();
            word.resize(WORD_BYTES, 0);
            let (at, told) = read(&word).unwrap();
            assert_eq!((at, told.expose()), (endpoint, secret.expose()));
        }
        let failed = Word::Failed(&"long ".repeat(1000)).encode();
        assert!(failed.len() <= WORD_BYTES);
        let error = read(&failed).unwrap_err().to_string();
        assert!(error.contains("rank 0 cannot host the store: long"), "{error}");
        for broken in [&[][..], &[0, 9, 0, 0, 0], &[0, 0, 0, 255, 255]] {
            assert!(read(broken).is_err());
        }
    }

    #[test]
    fn the_url_takes_nothing() {
        let error = meet("mpi://host:1", &Config::default()).unwrap_err().to_string();
        assert!(error.contains("takes nothing (host:1)"), "{error}");
    }
}
