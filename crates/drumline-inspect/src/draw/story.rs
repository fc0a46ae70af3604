use std::collections::{HashMap, HashSet};

use drumline_schedule::step::{Buffer, Loc, Rank};
use drumline_schedule::tree::Node;
use drumline_schedule::{Schedule, Topology};

use super::events::{Event, Kind, hull};
use crate::check::CheckError;
use crate::walk::{At, Combine, Visitor, walk};

/// The events of all ranks, by round, and the row of each.
pub(super) fn tell(
    topology: &Topology,
    schedules: &[Schedule],
) -> Result<(Vec<Event>, Vec<usize>), CheckError> {
    let mut story = Story {
        rounds: vec![0; schedules.len()],
        posts: vec![vec![]; schedules.len()],
        events: vec![],
        waits: HashMap::new(),
    };
    walk(topology, schedules, 1, &mut story)?;
    // Nothing depends on a later round, so this keeps causes above their effects.
    story.events.sort_by_key(|event| event.round);
    let rows = rows(&story.events, schedules.len());
    Ok((story.events, rows))
}

/// The events, in a possible order: a visitor of the walk.
struct Story {
    /// For each rank, the messages and posts in the longest chain up to now.
    rounds: Vec<usize>,
    /// For each rank, the round in which a wait for each of its posts ends.
    posts: Vec<Vec<usize>>,
    events: Vec<Event>,
    /// The index of the event with the waits of a rank in a round.
    waits: HashMap<(Rank, usize), usize>,
}

struct Message {
    from: Rank,
    src: Loc,
    round: usize,
}

impl Story {
    fn push(&mut self, rank: Rank, kind: Kind) -> Result<(), CheckError> {
        self.events.push(Event { round: self.rounds[rank], kind });
        Ok(())
    }
}

impl Visitor for Story {
    type Message = Message;

    fn enter(&mut self, _rank: Rank, _call: usize) -> Result<(), CheckError> {
        Ok(())
    }

    fn begin(&mut self, _rank: Rank, _call: usize) -> Result<(), CheckError> {
        Ok(())
    }

    fn send(&mut self, at: At, _to: Rank, src: Loc) -> Result<Message, CheckError> {
        Ok(Message { from: at.rank, src, round: self.rounds[at.rank] + 1 })
    }

    fn receive(
        &mut self,
        at: At,
        dst: Loc,
        combine: Option<Combine>,
        Message { from, src, round }: Message,
    ) -> Result<(), CheckError> {
        self.rounds[at.rank] = self.rounds[at.rank].max(round);
        self.push(at.rank, Kind::Message { from, to: at.rank, src, dst, combine })
    }

    fn reduce(&mut self, at: At, dst: Loc, _src: Loc, how: Combine) -> Result<(), CheckError> {
        let (reads, writes) = (vec![], vec![]);
        self.push(at.rank, Kind::Combine { rank: at.rank, dst, finish: how.finish, reads, writes })
    }

    fn reduce_tree(
        &mut self,
        at: At,
        dsts: &[Loc],
        srcs: &[(Node, Loc)],
        finish: bool,
    ) -> Result<(), CheckError> {
        let rank = at.rank;
        let reads = srcs.iter().filter_map(|(_, src)| src.peer).collect();
        let writes = dsts.iter().filter_map(|dst| dst.peer).collect();
        // The destination among the data says most.
        let is_data = |dst: &&Loc| dst.buffer == Buffer::Data;
        match dsts.iter().find(is_data).or(dsts.first()) {
            Some(&dst) => self.push(rank, Kind::Combine { rank, dst, finish, reads, writes }),
            None => Ok(()),
        }
    }

    fn copy(&mut self, at: At, dst: Loc, src: Loc) -> Result<(), CheckError> {
        let rank = at.rank;
        match dst.peer.or(src.peer) {
            None => self.push(rank, Kind::Copy { rank, dst }),
            Some(_) => self.push(rank, Kind::Reach { rank, dst, src }),
        }
    }

    fn flush(&mut self, _at: At, _to: Rank, _upto: usize) -> Result<(), CheckError> {
        Ok(())
    }

    fn post(&mut self, At { rank, .. }: At) -> Result<(), CheckError> {
        self.posts[rank].push(self.rounds[rank] + 1);
        self.push(rank, Kind::Post { rank })
    }

    fn wait(&mut self, At { rank, .. }: At, peer: Rank, upto: usize) -> Result<(), CheckError> {
        let posted = upto.checked_sub(1).and_then(|last| self.posts[peer].get(last));
        let round = self.rounds[rank].max(posted.copied().unwrap_or(0));
        self.rounds[rank] = round;
        let before = self.waits.get(&(rank, round)).and_then(|&at| self.events.get_mut(at));
        if let Some(Event { kind: Kind::Wait { peers, .. }, .. }) = before {
            peers.push(peer);
            return Ok(());
        }
        self.waits.insert((rank, round), self.events.len());
        self.push(rank, Kind::Wait { rank, peers: vec![peer] })
    }

    fn leave(&mut self, _rank: Rank, _call: usize) -> Result<(), CheckError> {
        Ok(())
    }
}

/// The row of each event. Events that touch different lanes share a row. A mark on a lane is below all
/// earlier events of that lane, and above all later ones.
fn rows(events: &[Event], world_size: usize) -> Vec<usize> {
    let mut taken: HashSet<(usize, Rank)> = HashSet::new();
    // The first row below the last mark of each lane, and below its last event.
    let mut below_mark = vec![0; world_size];
    let mut below_all = vec![0; world_size];
    let mut round = 0;
    let mut rows = vec![];
    for event in events {
        if event.round != round {
            round = event.round;
            let end = below_all.iter().max().copied().unwrap_or(0);
            below_mark.fill(end);
            below_all.fill(end);
        }
        let (lanes, marked) = event.kind.lanes();
        let crossed = hull(&lanes);
        let mut row = lanes.iter().map(|&lane| below_mark[lane]).max().unwrap_or(0);
        row = marked.map_or(row, |lane| row.max(below_all[lane]));
        while crossed.clone().any(|lane| taken.contains(&(row, lane))) {
            row += 1;
        }
        taken.extend(crossed.map(|lane| (row, lane)));
        for lane in lanes {
            below_all[lane] = below_all[lane].max(row + 1);
        }
        if let Some(lane) = marked {
            below_mark[lane] = row + 1;
        }
        rows.push(row);
    }
    rows
}
