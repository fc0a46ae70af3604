//! Sends and receives the messages of a rank.

use bytemuck::Pod;
use drumline::{Element, ProcessGroup};
use drumline_schedule::step::Rank;

use super::script::Messages;
use crate::{
    on_group::UnderWay,
    value::{read_all, with_width},
};

impl Messages {
    /// Sends and receives in the background.
    pub(super) fn begin(&self, group: &ProcessGroup) -> Result<UnderWay<()>, String> {
        with_width!(self.case.dtype, T => begin::<T>(self, group))
            .map_err(|error| error.to_string())
    }

    /// Sends and receives, and waits for each.
    pub(super) fn perform(&self, group: &ProcessGroup) -> Result<(), String> {
        let received = with_width!(self.case.dtype, T => perform::<T>(self, group));
        self.compare(received.map_err(|error| error.to_string())?)
    }

    /// The contents of a rank's message.
    fn payload(&self, rank: Rank) -> Vec<u8> {
        self.case.contribution(rank, self.case.elements)
    }

    /// Checks that all expected messages have come, with the right contents.
    fn compare(&self, received: Vec<(Vec<u8>, Rank)>) -> Result<(), String> {
        let mut from: Vec<Rank> = received.iter().map(|(_, from)| *from).collect();
        let mut expected = if received.is_empty() { vec![] } else { self.from.clone() };
        from.sort_unstable();
        expected.sort_unstable();
        if from != expected {
            return Err(format!("wrong: messages from ranks {from:?}, not {expected:?}"));
        }
        let is_right = |(bytes, from): &(Vec<u8>, Rank)| *bytes == self.payload(*from);
        match received.iter().all(is_right) {
            true => Ok(()),
            false => Err("wrong content".to_owned()),
        }
    }
}

fn begin<T: Element + Pod>(
    messages: &Messages,
    group: &ProcessGroup,
) -> drumline::Result<UnderWay<()>> {
    let Messages { from, to, tag, any, case } = messages;
    let me = group.rank();
    let send = || match from.contains(&me) {
        true => group.send_async(read_all::<T>(&messages.payload(me)), *to, *tag).map(Some),
        false => Ok(None),
    };
    // Send first: if all others have left, a receive from any rank fails unless this rank has sent.
    let early = if *any { send()? } else { None };
    let mut received: Vec<UnderWay<(Vec<T>, Rank)>> = Vec::new();
    for &from in from.iter().filter(|_| me == *to) {
        let room = vec![T::zeroed(); case.elements];
        received.push(match any {
            true => {
                let work = group.recv_any_async(room, *tag)?;
                Box::new(|wait| wait.of(work))
            }
            false => {
                let work = group.recv_async(room, from, *tag)?;
                Box::new(move |wait| Ok((wait.of(work)?, from)))
            }
        });
    }
    let sent = if *any { early } else { send()? };
    let messages = messages.clone();
    Ok(Box::new(move |wait| {
        let received = received.into_iter().map(|it| {
            let (data, from) = it(wait)?;
            Ok((bytemuck::cast_slice(&data).to_vec(), from))
        });
        messages.compare(received.collect::<Result<_, String>>()?)?;
        let sent = sent.map(|work| wait.of(work)).transpose()?;
        let is_changed =
            |sent: Vec<T>| bytemuck::cast_slice::<T, u8>(&sent) != messages.payload(me);
        match sent.is_some_and(is_changed) {
            true => Err("wrong: the sender's buffer has changed".to_owned()),
            false => Ok(()),
        }
    }))
}

fn perform<T: Element + Pod>(
    messages: &Messages,
    group: &ProcessGroup,
) -> drumline::Result<Vec<(Vec<u8>, Rank)>> {
    let Messages { from, to, tag, any, case } = messages;
    let me = group.rank();
    if from.contains(&me) {
        group.send(&read_all::<T>(&messages.payload(me)), *to, *tag)?;
    }
    let receive = |from: &Rank| {
        let mut data = vec![T::zeroed(); case.elements];
        let (data, from) = match any {
            true => group.recv_any_async(data, *tag)?.wait()?,
            false => group.recv(&mut data, *from, *tag).map(|()| (data, *from))?,
        };
        Ok((bytemuck::cast_slice(&data).to_vec(), from))
    };
    from.iter().filter(|_| me == *to).map(receive).collect()
}
