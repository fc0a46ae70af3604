//! The thread of a device group: it begins what may begin, and looks at what has ended.
//!
//! Three orders are kept. Copies out are queued in the order of the calls, since one that waits for its caller's
//! stream holds up those behind it. Calls of the host are made in the order of the calls, which is the same on all
//! ranks. Copies in are queued when they can begin at once, so nothing is held up by them. Messages take part in none
//! of these orders.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use drumline_device::{Action, Event, Stream};
use drumline_group::{Rank, driving};

use crate::direct::{Agreement, Answer, Direct, DirectCall, LOOK_EVERY, THROUGH_HOST, WORDS};
use crate::host_call::Operation;
use crate::inbox::{Body, Call, Closing, Shared};
use crate::options::Planted;
use crate::pool::Pool;
use crate::ring::{Ring, Window};
use crate::rounds;
use crate::staged::Staged;
use crate::work::Promise;
use crate::{Result, error};

/// What the watcher works with.
pub(crate) struct Watcher {
    shared: Arc<Shared>,
    ring: Ring,
    pool: Arc<Pool>,
    out: Arc<dyn Stream>,
    into: Arc<dyn Stream>,
    /// Where messages are copied out, once there was one: nothing waits in it.
    aside: Option<Arc<dyn Stream>>,
    /// Collectives that have not ended, from the first one on.
    calls: VecDeque<Running>,
    /// The number of the first of them.
    first: u64,
    /// The number of the call whose copies out are queued next, and of the one that the host makes next.
    out_at: u64,
    host_at: u64,
    messages: Vec<Running>,
    /// Agreements that are under way.
    agreeing: usize,
    /// What joins the devices, and the stream of its calls.
    direct: Option<(Arc<Direct>, Arc<dyn Stream>)>,
    /// When to look again whether a peer is lost, and whether one may be.
    look_at: Instant,
    asking: Option<Arc<Agreement>>,
    has_aborted: bool,
}

struct Running {
    promise: Promise,
    after: Arc<dyn Event>,
    part: Part,
    /// Whether all ranks let it go through the host, on a group where calls may go another way.
    announced: Option<Arc<Agreement>>,
}

enum Part {
    Windows(Windows),
    Staged(Box<Staged>),
    Direct(Box<DirectCall>),
}

/// How many windows of a call are where.
struct Windows {
    total: u64,
    elements: u64,
    /// Those that are not in the ring yet. All of them are, or none.
    waiting: Vec<Window>,
    /// Whether the ranks compare the lengths of the call.
    is_compared: bool,
    copied_out: u64,
    reduced: u64,
    ended: u64,
}

/// How often a watcher looks without a pause, how often it then lets other threads run between two looks, and how long
/// it sleeps at most after that.
const SPINS: u32 = 200;
const YIELDS: u32 = 50;
const SLEEP_MAX: Duration = Duration::from_micros(200);

impl Watcher {
    pub(crate) fn new(
        shared: Arc<Shared>,
        ring: Ring,
        [out, into]: [Arc<dyn Stream>; 2],
        direct: Option<(Arc<Direct>, Arc<dyn Stream>)>,
    ) -> Watcher {
        let pool = Pool::new(shared.device.clone());
        Watcher {
            shared,
            ring,
            pool,
            out,
            into,
            aside: None,
            calls: VecDeque::new(),
            first: 0,
            out_at: 0,
            host_at: 0,
            messages: Vec::new(),
            agreeing: 0,
            direct,
            look_at: Instant::now(),
            asking: None,
            has_aborted: false,
        }
    }

    /// Works until the group is closed and all calls have ended.
    pub(crate) fn run(mut self) -> Result<()> {
        let mut idle = 0;
        let closing = loop {
            let moved = match self.hear() {
                None => self.settle(),
                Some(moved) => match self.turn() {
                    Ok(more) => moved || more,
                    Err(error) => {
                        self.shared.fail(error);
                        true
                    }
                },
            };
            if self.is_idle() {
                match self.shared.closing() {
                    Some(closing) => break closing,
                    None => self.shared.sleep(None),
                }
            }
            idle = if moved { 0 } else { idle + 1 };
            self.rest(idle);
        };
        self.close(closing)
    }

    /// Leaves the group. Then the memory that neighbours may have read is freed.
    pub(crate) fn close(mut self, closing: Closing) -> Result<()> {
        let group = self.shared.group.clone();
        if let (Some(error), false) = (self.shared.failure(), matches!(closing, Closing::Drop)) {
            return Err(error);
        }
        match closing {
            Closing::Drop => {}
            Closing::Destroy => {
                group.destroy()?;
                self.ring.is_over();
            }
            Closing::Leave(patience) => group.leave(patience)?,
        }
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.calls.is_empty() && self.messages.is_empty() && self.agreeing == 0
    }

    /// Takes in what is new: whether there was something. `None`: the group has failed.
    fn hear(&mut self) -> Option<bool> {
        let (calls, summed, agreed, failed) = self.shared.read(|inbox| {
            use std::mem::take;
            let failed = inbox.failed.is_some();
            (take(&mut inbox.calls), take(&mut inbox.summed), take(&mut inbox.agreed), failed)
        });
        let moved = !(calls.is_empty() && summed.is_empty() && agreed.is_empty());
        calls.into_iter().for_each(|call| self.add(call));
        let mut failure = None;
        for (result, slot) in summed {
            self.ring.reduced(slot);
            failure = failure.or(result.err());
        }
        for result in agreed {
            self.agreeing -= 1;
            failure = failure.or(result.err());
        }
        let failed = failed || failure.is_some();
        failure.into_iter().for_each(|error| self.shared.fail(error));
        (!failed).then_some(moved)
    }

    fn add(&mut self, Call { promise, after, body }: Call) {
        match body {
            Body::Windows(mut waiting) => {
                let number = self.first + self.calls.len() as u64;
                waiting.iter_mut().for_each(|window| window.call = number);
                let elements = waiting.iter().map(|it| (it.bytes() / it.dtype.size()) as u64).sum();
                let total = waiting.len() as u64;
                let windows = Windows {
                    total,
                    elements,
                    waiting,
                    is_compared: false,
                    copied_out: 0,
                    reduced: 0,
                    ended: 0,
                };
                self.calls.push_back(Running::new(promise, after, Part::Windows(windows)));
            }
            Body::Direct(call) => {
                self.calls.push_back(Running::new(promise, after, Part::Direct(call)));
            }
            Body::Staged(staged) => {
                let is_message = staged.operation().is_message();
                let running = Running::new(promise, after, Part::Staged(staged));
                match is_message {
                    true => self.messages.push(running),
                    false => self.calls.push_back(running),
                }
            }
        }
    }

    /// One look at everything: whether something has moved.
    fn turn(&mut self) -> Result<bool> {
        let mut moved = false;
        while self.ring.land_out()? {
            moved = true;
        }
        moved |= self.queue_copies_out()?;
        moved |= self.make_calls()?;
        while let Some(call) = self.ring.copy_in()? {
            moved = true;
            if self.shared.options.has(Planted::EndsEarly) {
                self.promise_of(call).complete(Ok(()));
            }
        }
        while let Some(call) = self.ring.land_in()? {
            moved = true;
            if let Part::Windows(windows) = &mut self.calls[(call - self.first) as usize].part {
                windows.ended += 1;
            }
        }
        moved |= self.send_and_receive()?;
        moved |= self.land_direct()?;
        let Watcher { shared, calls, messages, into, pool, .. } = self;
        for Running { part, after, promise, .. } in calls.iter_mut().chain(messages) {
            let Part::Staged(staged) = part else { continue };
            let event = (!shared.options.has(Planted::WritesEarly)).then_some(&**after);
            let went = staged.go_on(&**into, pool, event);
            moved |= went?;
            if shared.options.has(Planted::EndsEarly) && staged.is_coming_in() {
                promise.complete(Ok(()));
            }
        }
        self.end_calls();
        Ok(moved)
    }

    fn queue_copies_out(&mut self) -> Result<bool> {
        let mut moved = false;
        let is_early = self.shared.options.has(Planted::ReadsEarly);
        while let Some(call) = self.calls.get_mut((self.out_at - self.first) as usize) {
            let after = (!is_early).then_some(&call.after);
            match &mut call.part {
                Part::Staged(staged) => {
                    let event = after.map(|event| &**event);
                    let copied = staged.copy_out(&*self.out, &self.pool, event);
                    copied?;
                }
                // Nothing is copied.
                Part::Direct(_) => {}
                Part::Windows(windows) => {
                    for (at, mut window) in windows.waiting.drain(..).enumerate() {
                        match is_early {
                            true => window.after.clear(),
                            false => window.after.extend(after.filter(|_| at == 0).cloned()),
                        }
                        self.ring.add(window);
                    }
                    while windows.copied_out < windows.total && self.ring.copy_out()? {
                        windows.copied_out += 1;
                        moved = true;
                    }
                    if windows.copied_out < windows.total {
                        break;
                    }
                }
            }
            self.out_at += 1;
            moved = true;
        }
        Ok(moved)
    }

    /// Makes the calls of the host that may begin.
    fn make_calls(&mut self) -> Result<bool> {
        let mut moved = false;
        while self.host_at < self.out_at
            || self
                .calls
                .get((self.host_at - self.first) as usize)
                .is_some_and(Running::has_windows)
        {
            let call = &mut self.calls[(self.host_at - self.first) as usize];
            match &mut call.part {
                Part::Direct(it) => {
                    // Such calls are made where devices are joined.
                    let Some((direct, stream)) = &self.direct else { break };
                    let (shared, agreeing) = (&self.shared, &mut self.agreeing);
                    let agree = |words: &[u64; WORDS]| {
                        *agreeing += 1;
                        rounds::agree_on_call(shared, words)
                    };
                    if !it.go_on(direct, &**stream, &*call.after, agree)? {
                        break;
                    }
                }
                Part::Staged(staged) => {
                    if self.direct.is_some()
                        && !agreed_on_host(&mut call.announced, &self.shared, &mut self.agreeing)
                    {
                        break;
                    }
                    let made = staged.call_host(&self.shared.group, &self.pool);
                    if !made? {
                        break;
                    }
                }
                Part::Windows(windows) => {
                    if self.direct.is_some()
                        && !agreed_on_host(&mut call.announced, &self.shared, &mut self.agreeing)
                    {
                        break;
                    }
                    if windows.total > 1 && !windows.is_compared {
                        windows.is_compared = true;
                        rounds::agree_on_length(&self.shared, windows.elements);
                        self.agreeing += 1;
                    }
                    while windows.reduced < windows.total {
                        let shared = self.shared.clone();
                        let end = move |result, slot| {
                            shared.tell(|inbox| inbox.summed.push((result, slot)));
                        };
                        if !self.ring.reduce(&self.shared.group, end) {
                            break;
                        }
                        windows.reduced += 1;
                        moved = true;
                    }
                    if windows.reduced < windows.total {
                        break;
                    }
                }
            }
            self.host_at += 1;
            moved = true;
        }
        Ok(moved)
    }

    /// Looks which calls of the devices have ended, and whether a rank that takes part is lost.
    fn land_direct(&mut self) -> Result<bool> {
        let (mut moved, mut is_under_way) = (false, false);
        for Running { part, .. } in &mut self.calls {
            if let Part::Direct(call) = part {
                moved |= call.land()?;
                is_under_way |= call.is_under_way();
            }
        }
        let now = Instant::now();
        let is_asking = self.asking.as_ref().is_some_and(|it| it.answer() == Answer::None);
        if is_under_way && !is_asking && now >= self.look_at {
            self.look_at = now + LOOK_EVERY;
            if driving::hear(&self.shared.group, None).is_some() {
                self.agreeing += 1;
                self.asking = Some(rounds::ask_all(&self.shared));
            }
        }
        Ok(moved)
    }

    /// Messages whose caller's stream has come there are copied out; receives are posted.
    fn send_and_receive(&mut self) -> Result<bool> {
        let mut moved = false;
        // Messages to one rank with one tag keep their order.
        let mut held_up: Vec<(Rank, u64)> = Vec::new();
        for Running { promise, after, part, .. } in &mut self.messages {
            let Part::Staged(staged) = part else { continue };
            let operation = promise.operation();
            let line = match *staged.operation() {
                Operation::Send(to, tag) => Some((to, tag)),
                _ => None,
            };
            if line.is_some_and(|line| held_up.contains(&line)) {
                continue;
            }
            if staged.is_asked() {
                let is_early = line.is_none() || self.shared.options.has(Planted::SendsEarly);
                if !is_early && !after.has_come().map_err(error::of(operation))? {
                    held_up.extend(line);
                    continue;
                }
                let aside = match &self.aside {
                    Some(aside) => aside,
                    None => {
                        let stream = self.shared.device.stream().map_err(error::of(operation));
                        self.aside.insert(stream?)
                    }
                };
                staged.copy_out(&**aside, &self.pool, None)?;
                moved = true;
            }
            moved |= staged.call_host(&self.shared.group, &self.pool)?;
            held_up.extend(line.filter(|_| staged.is_coming_out()));
        }
        Ok(moved)
    }

    /// Tells those whose calls have ended.
    fn end_calls(&mut self) {
        for call in &self.calls {
            if call.has_ended() {
                call.promise.complete(Ok(()));
            }
        }
        while self.calls.front().is_some_and(Running::has_ended) {
            self.calls.pop_front();
            self.first += 1;
        }
        self.messages.retain(|message| {
            let has_ended = message.has_ended();
            if has_ended {
                if let Part::Staged(staged) = &message.part {
                    message.promise.came_from(staged.source());
                }
                message.promise.complete(Ok(()));
            }
            !has_ended
        });
    }

    /// After a failure: lets nothing begin, and tells the failure to the calls whose copies have ended. Their order
    /// matters: a copy may wait for a stream that waits for an earlier call.
    fn settle(&mut self) -> bool {
        let Some(error) = self.shared.failure() else { return false };
        let mut moved = false;
        if let Some((direct, _)) = &self.direct
            && !std::mem::replace(&mut self.has_aborted, true)
        {
            direct.abort();
        }
        self.messages.retain_mut(|message| {
            let is_settled = match &mut message.part {
                Part::Windows(_) | Part::Direct(_) => true,
                Part::Staged(staged) => staged.is_settled(),
            };
            if is_settled {
                message.promise.complete(Err(error.clone()));
                moved = true;
            }
            !is_settled
        });
        while let Some(call) = self.calls.front_mut() {
            // Sums of the host end soon, since their group has failed.
            let is_settled = match &mut call.part {
                Part::Windows(_) => self.ring.is_settled(self.first),
                Part::Staged(staged) => staged.is_settled(),
                Part::Direct(call) => {
                    self.direct.as_ref().is_none_or(|(_, stream)| call.is_settled(&**stream))
                }
            };
            if !is_settled {
                break;
            }
            call.promise.complete(Err(error.clone()));
            self.calls.pop_front();
            self.first += 1;
            moved = true;
        }
        moved
    }

    /// Waits a little, and longer from time to time. Drives the group if the host has something to do.
    fn rest(&mut self, idle: u32) {
        if idle == 0 || self.is_idle() {
            return;
        }
        let pause = SLEEP_MAX.min(Duration::from_micros(u64::from(idle.saturating_sub(SPINS)) + 1));
        if self.is_on_host() {
            let deadline = Instant::now() + pause;
            let done = || self.shared.has_news() || self.have_staged_news();
            if driving::help(&self.shared.group, Some(deadline), &done) {
                return;
            }
        }
        match idle {
            ..SPINS => std::hint::spin_loop(),
            _ if idle < SPINS + YIELDS => thread::yield_now(),
            _ => self.shared.sleep(Some(pause)),
        }
    }

    fn is_on_host(&self) -> bool {
        let all = || self.calls.iter().chain(&self.messages);
        self.agreeing > 0
            || self.ring.is_under_way(Action::Reduce)
            || all().any(|it| matches!(&it.part, Part::Staged(staged) if staged.is_on_host()))
    }

    fn have_staged_news(&self) -> bool {
        let all = self.calls.iter().chain(&self.messages);
        let mut staged = all.filter_map(|it| match &it.part {
            Part::Staged(staged) => Some(staged),
            Part::Windows(_) | Part::Direct(_) => None,
        });
        staged.any(|it| it.has_news())
    }

    fn promise_of(&self, call: u64) -> &Promise {
        &self.calls[(call - self.first) as usize].promise
    }
}

/// Whether all ranks have said that this call goes through the host. Asks them, if they were not asked or asked back.
fn agreed_on_host(
    announced: &mut Option<Arc<Agreement>>,
    shared: &Arc<Shared>,
    agreeing: &mut usize,
) -> bool {
    match announced.as_ref().map(|it| it.answer()) {
        Some(Answer::Same) => return true,
        Some(Answer::None) => {}
        None | Some(Answer::Asked) => {
            *agreeing += 1;
            *announced = Some(rounds::agree_on_call(shared, &THROUGH_HOST));
        }
    }
    false
}

impl Running {
    fn new(promise: Promise, after: Arc<dyn Event>, part: Part) -> Running {
        Running { promise, after, part, announced: None }
    }

    fn has_windows(&self) -> bool {
        matches!(self.part, Part::Windows(_))
    }

    fn has_ended(&self) -> bool {
        match &self.part {
            Part::Windows(windows) => windows.ended == windows.total,
            Part::Staged(staged) => staged.is_done(),
            Part::Direct(call) => call.is_done(),
        }
    }
}
