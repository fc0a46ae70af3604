//! Calls that pass through memory of the host as a whole: out, through the host's call, and in.

use std::mem::replace;
use std::sync::Arc;

use drumline_device::{Event, Flight, Part, Pinned, Place, Stream};
use drumline_group::{DType, ProcessGroup, Rank};

use crate::host_call::{self, Brought, Operation, UnderWay};
use crate::pool::{Lent, Pool};
use crate::{Result, error};

/// What is asked for.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    pub(crate) dtype: DType,
    /// What is copied out, one piece behind the other.
    pub(crate) out: Vec<Place>,
    /// Whether it is copied into the memory that the host changes, or else into one of its own.
    pub(crate) in_place: bool,
    /// What the host changes.
    pub(crate) data_bytes: usize,
    /// Where that is copied in, piece by piece. It may be nowhere.
    pub(crate) into: Vec<Place>,
}

/// How far such a call has come.
#[derive(Debug)]
pub(crate) struct Staged {
    request: Request,
    stage: Stage,
    /// Who has sent what any rank could send.
    source: Option<Rank>,
}

enum Stage {
    Asked,
    /// The copy out, and the memory of the results, if that is another one.
    Out(Option<Flight<Pinned>>, Lent),
    Host(UnderWay),
    /// The host has done its part.
    Back(Lent),
    In(Flight<Pinned>),
    Done,
}

impl Staged {
    pub(crate) fn new(request: Request) -> Staged {
        Staged { request, stage: Stage::Asked, source: None }
    }

    pub(crate) fn operation(&self) -> &Operation {
        &self.request.operation
    }

    pub(crate) fn source(&self) -> Option<Rank> {
        self.source
    }

    pub(crate) fn is_asked(&self) -> bool {
        matches!(self.stage, Stage::Asked)
    }

    pub(crate) fn is_coming_out(&self) -> bool {
        matches!(self.stage, Stage::Out(..))
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.stage, Stage::Host(_))
    }

    /// Whether the host's call has ended.
    pub(crate) fn has_news(&self) -> bool {
        matches!(&self.stage, Stage::Host(call) if call.has_ended())
    }

    /// Queues the copy out, after `event`.
    pub(crate) fn copy_out(
        &mut self,
        stream: &dyn Stream,
        pool: &Arc<Pool>,
        event: Option<&dyn Event>,
    ) -> Result<()> {
        let Request { ref out, in_place, data_bytes, .. } = self.request;
        let parts = parts_of(out);
        let failed = error::of(self.request.operation.name());
        let data = match in_place {
            true => Lent::nothing(pool),
            false => pool.lend(data_bytes).map_err(&failed)?,
        };
        let held = if in_place { data_bytes } else { bytes_of(out) };
        let memory = pool.lend(held).map_err(&failed)?.take();
        let (flight, result) = match memory {
            Some(memory) if !parts.is_empty() => {
                if let Some(event) = event {
                    stream.wait(event).map_err(&failed)?;
                }
                match stream.copy_out(&parts, memory.into()) {
                    Ok(flight) => (Some(flight), Ok(())),
                    Err(refused) => (Some(refused.1), Err(failed(refused.0))),
                }
            }
            memory => (memory.map(Flight::from), Ok(())),
        };
        self.stage = Stage::Out(flight, data);
        result
    }

    /// Makes the host's call, if the copy out has come. `true`: it is made.
    pub(crate) fn call_host(&mut self, group: &ProcessGroup, pool: &Arc<Pool>) -> Result<bool> {
        let name = self.request.operation.name();
        let failed = error::of(name);
        let Stage::Out(flight, _) = &mut self.stage else { return Ok(false) };
        if let Some(flight) = flight
            && !flight.has_landed().map_err(&failed)?
        {
            return Ok(false);
        }
        let Stage::Out(flight, data) = replace(&mut self.stage, Stage::Done) else {
            unreachable!("it is coming out")
        };
        let Request { operation, dtype, out, in_place, data_bytes, .. } = &self.request;
        let landed = flight.map(Flight::land).transpose().map_err(&failed)?;
        let landed = landed.map_or_else(|| Lent::nothing(pool), |it| Lent::again(pool, it));
        let brought = match in_place {
            true => Brought { data: (landed, *data_bytes), input: (data, 0) },
            false => Brought { data: (data, *data_bytes), input: (landed, bytes_of(out)) },
        };
        self.stage = Stage::Host(host_call::begin(group, operation, *dtype, brought)?);
        Ok(true)
    }

    /// What follows the host's call: `true` if something has moved. Copies in wait for `event`.
    pub(crate) fn go_on(
        &mut self,
        stream: &dyn Stream,
        pool: &Arc<Pool>,
        event: Option<&dyn Event>,
    ) -> Result<bool> {
        let failed = error::of(self.request.operation.name());
        match replace(&mut self.stage, Stage::Done) {
            Stage::Host(call) if call.has_ended() => {
                let (memory, source) = call.end()?;
                (self.stage, self.source) = (Stage::Back(memory), source);
                Ok(true)
            }
            Stage::Back(memory) if bytes_of(&self.request.into) == 0 => {
                drop(memory);
                Ok(true)
            }
            Stage::Back(memory) => {
                if let Some(event) = event
                    && !event.has_come().map_err(&failed)?
                {
                    self.stage = Stage::Back(memory);
                    return Ok(false);
                }
                let Some(memory) = memory.take() else { return Ok(true) };
                let parts = parts_of(&self.request.into);
                let (flight, result) = match stream.copy_in(&parts, memory.into()) {
                    Ok(flight) => (flight, Ok(true)),
                    Err(refused) => (refused.1, Err(failed(refused.0))),
                };
                self.stage = Stage::In(flight);
                result
            }
            Stage::In(mut flight) => match flight.has_landed() {
                Ok(true) => {
                    drop(Lent::again(pool, flight.land().map_err(&failed)?));
                    Ok(true)
                }
                Ok(false) => {
                    self.stage = Stage::In(flight);
                    Ok(false)
                }
                Err(error) => {
                    self.stage = Stage::In(flight);
                    Err(failed(error))
                }
            },
            before => {
                self.stage = before;
                Ok(false)
            }
        }
    }

    /// Whether the copy in is queued.
    pub(crate) fn is_coming_in(&self) -> bool {
        matches!(self.stage, Stage::In(_))
    }

    /// After a failure: whether nothing uses the device memory of the call, nor its memory of the host, any more.
    pub(crate) fn is_settled(&mut self) -> bool {
        let is_settled = match &mut self.stage {
            Stage::Out(Some(flight), _) | Stage::In(flight) => {
                !matches!(flight.has_landed(), Ok(false))
            }
            Stage::Host(call) => call.has_ended(),
            Stage::Asked | Stage::Out(None, _) | Stage::Back(_) | Stage::Done => true,
        };
        if is_settled {
            // What has failed is dropped: that waits for a copy, or leaks its memory.
            self.stage = Stage::Done;
        }
        is_settled
    }
}

fn bytes_of(pieces: &[Place]) -> usize {
    pieces.iter().map(|place| place.bytes).sum()
}

/// Where pieces lie in memory of the host.
fn parts_of(pieces: &[Place]) -> Vec<Part> {
    let mut at = 0;
    let part = |place: &Place| {
        let part = Part { place: *place, at, window: None };
        at += place.bytes;
        part
    };
    pieces.iter().filter(|place| place.bytes > 0).map(part).collect()
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Stage::Asked => "Asked",
            Stage::Out(..) => "Out",
            Stage::Host(_) => "Host",
            Stage::Back(_) => "Back",
            Stage::In(_) => "In",
            Stage::Done => "Done",
        })
    }
}
