//! How ranks find out which of them share memory.

use drumline_schedule::{Topology, step::Rank};

use crate::error::one_line;

use super::{
    board::{Board, Subject},
    failure::Failure,
    steps::{Answer, Ask, Desk, Outside},
};

/// What a rank offers to share, and how it is set.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// The peers to which this rank can hand over memory.
    pub near: &'a [Rank],
    /// Whether it wants to share memory.
    pub wanted: bool,
    /// The memory node that this rank is on.
    pub node: Option<usize>,
    /// Its settings that must be alike on all ranks.
    pub alike: &'a [Alike],
    /// The prices by which it chooses algorithms.
    pub prices: &'a str,
}

/// A setting that must be alike on all ranks.
#[derive(Clone, Debug)]
pub struct Alike {
    /// What it is: `security level`.
    pub what: &'static str,
    /// The variable that sets it.
    pub variable: &'static str,
    /// Its value on this rank, without a space.
    pub value: String,
}

impl Alike {
    /// The error when a rank has the value `theirs`.
    fn differs(&self, theirs: &str) -> String {
        let Alike { what, variable, value } = self;
        format!(
            "its {what} is {theirs}, that of this rank {value}: set {variable} alike on all ranks"
        )
    }
}

/// Shares memory with all ranks of this host, or with none: then they use sockets. Returns the topology, and
/// why this rank shares no memory if it shares none. A rank that shares no memory counts as a host of its
/// own. All ranks must have the same settings and the same prices.
///
/// # Errors
///
/// [`Failure::Connect`] when a rank has another setting or other prices, fails, or says nothing in time.
pub async fn share<W: Outside>(
    desk: &Desk<W>,
    board: &Board,
    offer: Offer<'_>,
) -> Result<(Result<(), String>, Topology), Failure<W::Error>> {
    let Offer { near, wanted, node, alike, prices } = offer;
    let member = board.member();
    let made = match wanted {
        true => memory(desk.ask(Ask::MakeMemory).await?),
        false => Err("it is switched off".to_owned()),
    };
    // First every rank says whether it has a segment. A rank without one maps no segments of others.
    let word = made.as_ref().map_or_else(String::clone, |()| READY.to_owned());
    let words = board.all_gather(desk, Subject::Segment, word.as_bytes()).await?;
    let mut shared = made;
    for rank in near {
        let theirs = &words[*rank];
        if theirs != READY.as_bytes() {
            let theirs = one_line(theirs);
            shared = shared.and_then(|()| Err(format!("rank {rank} has no segment: {theirs}")));
        }
    }
    if shared.is_ok() {
        shared = memory(desk.ask(Ask::MapMemory).await?);
    }

    // Then every rank says whether it has mapped the others' segments. If one rank fails, no rank of its host
    // shares memory.
    let host = near.iter().copied().chain([member.rank]).min().unwrap_or(member.rank);
    let word = shared.as_ref().map_or_else(|_| "private".to_owned(), |()| host.to_string());
    let node = node.map_or_else(|| "any".to_owned(), |node| node.to_string());
    let values: String = alike.iter().map(|it| format!(" {}", it.value)).collect();
    let word = format!("{word} {node} {prices}{values}");
    let told = board.all_gather(desk, Subject::Host, word.as_bytes()).await?;
    let told = told.into_iter().enumerate().map(|(rank, word)| {
        let word = String::from_utf8_lossy(&word);
        let mut words = word.split(' ');
        let mut number = || words.next()?.parse::<usize>().ok();
        let place = (number(), number());
        let their_prices = words.next().unwrap_or_default();
        for own in alike {
            let theirs = words.next().unwrap_or_default();
            if theirs != own.value {
                return Err(Failure::by(member, rank, &own.differs(theirs)));
            }
        }
        match their_prices == prices {
            true => Ok(place),
            false => Err(Failure::by(member, rank, &other_prices(their_prices, prices))),
        }
    });
    let told: Vec<(Option<Rank>, Option<usize>)> = told.collect::<Result<_, _>>()?;
    let (told, nodes): (Vec<_>, Vec<_>) = told.into_iter().unzip();
    let complete = near.iter().all(|rank| told[*rank] == Some(host));
    let shared = shared.and_then(|()| match complete {
        true => Ok(()),
        false => Err("a neighbour could not map it".to_owned()),
    });
    if let (Err(reason), true) = (&shared, wanted) {
        tracing::warn!(
            group = member.name,
            rank = member.rank,
            reason,
            "ranks of this host share no memory and talk over sockets"
        );
    }
    // If not all ranks of a host share memory, each of them becomes a host of its own. All ranks conclude
    // this alike.
    let of_host = |host: Rank| told.iter().filter(move |word| **word == Some(host)).count();
    let expected = |rank: Rank| match told[rank] {
        Some(host) if of_host(host) > 1 => host,
        _ => rank,
    };
    let topology = Topology::placed((0..member.world_size).map(expected));
    Ok((shared, topology.with_nodes(nodes)))
}

const READY: &str = "ready";

fn memory<S>(answer: Answer<S>) -> Result<(), String> {
    match answer {
        Answer::Memory(result) => result,
        _ => unreachable!("the answer is not of the question's kind"),
    }
}

/// The error when a rank has other prices.
fn other_prices(theirs: &str, ours: &str) -> String {
    let what = |word: &str| match word {
        "measured" => "those that are measured".to_owned(),
        digest => format!("those with the digest {digest}"),
    };
    format!(
        "it chooses algorithms by other prices than this rank: by {}, this rank by {}; set \
         DRUMLINE_PRICES to the same on all ranks, and if it is a file, to the same contents",
        what(theirs),
        what(ours)
    )
}
