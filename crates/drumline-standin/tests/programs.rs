//! Random programs: what is ordered rightly has the right bits in every order, and a missing wait shows.

mod c;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use c::*;

const LEN: usize = 96;
const STREAMS: usize = 4;
const ON_DEVICE: usize = 4;
const ON_HOST: usize = 3;

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// Who has used a buffer last: events.
#[derive(Clone, Default)]
struct Uses {
    write: Option<usize>,
    reads: Vec<usize>,
}

/// A program that waits for all that it must wait for, but for one operation that forgets to.
struct Program {
    random: Random,
    /// How many operations that must wait for another stream do so, before one forgets to.
    careless: Option<usize>,
    contexts: [usize; 2],
    streams: Vec<usize>,
    on_device: Vec<usize>,
    on_host: Vec<Pinned>,
    words: Pinned,
    /// Words that streams wait for, which the program has yet to write.
    gates: Vec<usize>,
    made: usize,
    uses: Vec<Uses>,
    events: Vec<usize>,
    queued_on: BTreeMap<usize, usize>,
    /// What each buffer holds once all is over.
    right: Vec<Vec<u8>>,
    wrong: bool,
}

impl Program {
    fn new(test: &Test, seed: u64, careless: Option<usize>) -> Self {
        let contexts = [test.use_device(1), test.use_device(0)];
        let mut program = Program {
            random: Random(seed),
            careless,
            contexts: [contexts[1], contexts[0]],
            streams: Vec::new(),
            on_device: Vec::new(),
            on_host: (0..ON_HOST).map(|_| Pinned::new(vec![0; LEN])).collect(),
            words: Pinned::new(vec![0; 4 * 100]),
            gates: Vec::new(),
            made: 0,
            uses: vec![Uses::default(); ON_DEVICE + ON_HOST],
            events: Vec::new(),
            queued_on: BTreeMap::new(),
            right: vec![vec![POISON; LEN]; ON_DEVICE],
            wrong: false,
        };
        program.right.extend(vec![vec![0; LEN]; ON_HOST]);
        for at in 0..STREAMS {
            program.on(at);
            // The last but one waits for the legacy stream, which is idle.
            program.streams.push(made(|it| cuStreamCreate(it, u32::from(at != STREAMS - 2))));
        }
        for at in 0..ON_DEVICE {
            program.on(at);
            program.on_device.push(device_memory(LEN));
        }
        program
    }

    /// The last stream and the last buffer are those of device 1.
    fn on(&self, at: usize) {
        assert_eq!(cuCtxSetCurrent(self.contexts[usize::from(at == STREAMS - 1)]), 0);
    }

    fn address(&self, buffer: usize) -> usize {
        if buffer < ON_DEVICE {
            self.on_device[buffer]
        } else {
            self.on_host[buffer - ON_DEVICE].at()
        }
    }

    fn run(mut self) -> bool {
        for _ in 0..40 {
            match self.random.below(10) {
                0 => self.wait_for_a_gate(),
                1 => self.open_a_gate(),
                2 => self.look(),
                3 => self.write(),
                4 if !self.events.is_empty() => {
                    let event = self.events[self.random.below(self.events.len())];
                    assert!([0, NOT_READY].contains(&cuEventQuery(event)));
                }
                _ => self.queue(),
            }
        }
        self.settle();
        for buffer in 0..ON_DEVICE {
            let bytes = vec![0; LEN];
            assert_eq!(cuMemcpyDtoH_v2(bytes.as_ptr() as usize, self.address(buffer), LEN), 0);
            self.wrong |= std::hint::black_box(bytes) != self.right[buffer];
        }
        for at in 0..ON_HOST {
            self.wrong |= self.on_host[at].now() != self.right[ON_DEVICE + at];
        }
        self.wrong
    }

    /// A copy or a fill on a stream, after all that it conflicts with.
    fn queue(&mut self) {
        let at = self.random.below(STREAMS);
        let (stream, to) = (self.streams[at], self.random.below(ON_DEVICE + ON_HOST));
        let from = self.random.below(ON_DEVICE + ON_HOST);
        let is_fill = to < ON_DEVICE && (from == to || self.random.below(4) == 0);
        if from == to && !is_fill {
            return;
        }
        self.on(at);
        let mut after: Vec<usize> =
            self.uses[to].reads.iter().copied().chain(self.uses[to].write).collect();
        after.extend(self.uses[from].write.filter(|_| !is_fill));
        // A wait for another stream, that is.
        let other = after.iter().any(|event| self.queued_on[event] != stream);
        let forgets = other && self.careless == Some(0);
        if other {
            self.careless = self.careless.and_then(|left| left.checked_sub(1));
        }
        if !forgets {
            for event in after {
                assert_eq!(cuStreamWaitEvent(stream, event, 0), 0);
            }
        }
        if is_fill {
            let value = self.random.below(200) as u8;
            assert_eq!(cuMemsetD8Async(self.address(to), value, LEN, stream), 0);
            self.right[to].fill(value);
        } else {
            assert_eq!(cuMemcpyAsync(self.address(to), self.address(from), LEN, stream), 0);
            self.right[to] = self.right[from].clone();
        }
        let event = event();
        assert_eq!(cuEventRecord(event, stream), 0);
        self.events.push(event);
        self.queued_on.insert(event, stream);
        self.uses[to] = Uses { write: Some(event), reads: Vec::new() };
        if !is_fill {
            self.uses[from].reads.push(event);
        }
    }

    fn wait_for_a_gate(&mut self) {
        if self.made == 90 {
            return;
        }
        let at = self.words.at().next_multiple_of(4) + 4 * self.made;
        self.made += 1;
        let stream = self.streams[self.random.below(STREAMS)];
        assert_eq!(cuStreamWaitValue32_v2(stream, at, 1, 1), 0);
        self.gates.push(at);
    }

    fn open_a_gate(&mut self) {
        if self.gates.is_empty() {
            return;
        }
        let at = self.gates.swap_remove(self.random.below(self.gates.len()));
        // SAFETY: an aligned word within the pinned bytes.
        unsafe { AtomicU32::from_ptr(at as *mut u32) }.store(1, Ordering::Release);
    }

    /// Waits for events, which gates may hold back.
    fn wait(&mut self, events: Vec<usize>) {
        if events.iter().any(|it| cuEventQuery(*it) == NOT_READY) {
            while !self.gates.is_empty() {
                self.open_a_gate();
            }
        }
        for event in events {
            assert_eq!(cuEventSynchronize(event), 0);
        }
    }

    /// The program reads a buffer of the host.
    fn look(&mut self) {
        let at = self.random.below(ON_HOST);
        self.wait(self.uses[ON_DEVICE + at].write.into_iter().collect());
        self.wrong |= self.on_host[at].now() != self.right[ON_DEVICE + at];
    }

    /// The program writes a buffer of the host.
    fn write(&mut self) {
        let (at, value) = (self.random.below(ON_HOST), self.random.below(200) as u8);
        let uses = std::mem::take(&mut self.uses[ON_DEVICE + at]);
        self.wait(uses.reads.into_iter().chain(uses.write).collect());
        self.on_host[at].0.fill(value);
        std::hint::black_box(&mut self.on_host[at].0);
        self.right[ON_DEVICE + at].fill(value);
    }

    fn settle(&mut self) {
        while !self.gates.is_empty() {
            self.open_a_gate();
        }
        for at in 0..STREAMS {
            assert_eq!(cuStreamSynchronize(self.streams[at]), 0);
        }
    }
}

fn is_wrong(program: u64, seed: u64, careless: Option<usize>) -> bool {
    let test = Test::new(seed);
    let wrong = Program::new(&test, program, careless).run();
    assert_eq!(standin_violations(), 0);
    wrong
}

#[test]
fn a_program_that_waits_has_the_right_bits_in_every_order() {
    let wrong: Vec<u64> = (0..2000).filter(|seed| is_wrong(*seed, *seed, None)).collect();
    assert!(wrong.is_empty(), "seeds {wrong:?}");
}

/// One operation of each program forgets to wait for another stream. What it spoils may be overwritten before anybody
/// looks, and another wait may do for it, so not every program can be wrong.
#[test]
fn a_missing_wait_shows() {
    let shows =
        |program: u64| (0..20).any(|seed| is_wrong(program, seed, Some(program as usize % 3)));
    let wrong = (0..100).filter(|program| shows(*program)).count();
    println!("{wrong} of 100 programs with a missing wait are wrong in one of 20 orders");
    assert!(wrong >= 15, "{wrong} of 100");
}
