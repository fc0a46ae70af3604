use std::{io, ops::Range};

use hmac_sha256::HMAC;

use super::{
    channel::Channel, hello::Hello, level::Level, nonce::Nonce, refusal::Refusal, secret::Secret,
};
use crate::{
    Rank,
    secured::{self, Layer, Tls},
};

/// One end of a connection that is being opened: bytes go in and out. It has no socket and no clock.
///
/// The end that opened the connection is the *caller*, the other the *answerer*. The driver
/// writes [`Handshake::output`], reads no more than [`Handshake::wanted`] bytes (what follows
/// belongs to the connection's user), hands them to [`Handshake::receive`], and closes the
/// connection after a [`Refusal`], as soon as the output is written.
///
/// ```
/// # use drumline_store as drumline;
/// use drumline::auth::Secret;
/// use drumline::auth::{Channel, Expected, Handshake, Hello, Nonce};
///
/// let secret = Some(Secret::new(*b"sixteen bytes at least")?);
/// let hello = |rank| Hello { channel: Channel::Data(0), rank, world_size: 2, group: 7 };
/// let expected = |rank| Expected { ranks: rank..rank + 1, world_size: 2, group: 7 };
/// let mut caller = Handshake::call(hello(1), expected(0), secret.clone(), Nonce::random()?);
/// let mut answerer = Handshake::answer(hello(0), expected(1), secret, Nonce::random()?);
/// while !(caller.is_done() && answerer.is_done()) {
///     let bytes = caller.take_output();
///     answerer.receive(&bytes)?;
///     let bytes = answerer.take_output();
///     caller.receive(&bytes)?;
/// }
/// assert_eq!(answerer.peer(), Some(&hello(1)));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Handshake {
    role: Role,
    secret: Option<Secret>,
    level: Level,
    expected: Expected,
    ours: Hello,
    nonce: Nonce,
    input: Vec<u8>,
    output: Vec<u8>,
    stage: Stage,
    /// At the level `tls`: the TLS connection through which the proofs go.
    tls: Option<Tls>,
    /// The layer that protects the connection after the handshake.
    layer: Option<Layer>,
}

/// The greetings that a handshake accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The ranks that may be at the other end.
    pub ranks: Range<Rank>,
    /// The world size that they must have.
    pub world_size: usize,
    /// The group to which they must belong.
    pub group: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Caller,
    Answerer,
}

impl Role {
    fn other(self) -> Role {
        match self {
            Role::Caller => Role::Answerer,
            Role::Answerer => Role::Caller,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// The other end's greeting comes next.
    Greeting,
    /// TLS is agreeing on keys.
    Tls {
        theirs: Hello,
        transcript: Vec<u8>,
    },
    /// The other end's proof comes next. Both greetings are kept as they were on the wire.
    Proof {
        theirs: Hello,
        transcript: Vec<u8>,
    },
    Done(Hello),
    Refused,
}

const PROOF_BYTES: usize = 32;

/// The answer to a wrong proof. It tells the caller that the secrets differ.
const NO_PROOF: [u8; PROOF_BYTES] = [0; PROOF_BYTES];

impl Handshake {
    /// The end that opened the connection. It greets first.
    pub fn call(
        ours: Hello,
        expected: Expected,
        secret: Option<Secret>,
        nonce: Nonce,
    ) -> Handshake {
        let mut handshake = Handshake::new(Role::Caller, ours, expected, secret, nonce);
        handshake.output = handshake.greeting().to_vec();
        handshake
    }

    /// The end that accepted the connection, for any channel between ranks, or only for the store
    /// if that is the channel of `ours`.
    pub fn answer(
        ours: Hello,
        expected: Expected,
        secret: Option<Secret>,
        nonce: Nonce,
    ) -> Handshake {
        Handshake::new(Role::Answerer, ours, expected, secret, nonce)
    }

    fn new(
        role: Role,
        ours: Hello,
        expected: Expected,
        secret: Option<Secret>,
        nonce: Nonce,
    ) -> Handshake {
        let (input, output) = (Vec::with_capacity(Hello::BYTES), Vec::new());
        Handshake {
            role,
            secret,
            level: Level::Auth,
            expected,
            ours,
            nonce,
            input,
            output,
            stage: Stage::Greeting,
            tls: None,
            layer: None,
        }
    }

    /// The same handshake at this level, which needs a secret unless it is `auth`. Call it before the
    /// handshake begins.
    #[must_use]
    pub fn at(mut self, level: Level) -> Handshake {
        self.level = level;
        if self.role == Role::Caller {
            self.output = self.greeting().to_vec();
        }
        self
    }

    /// Takes the layer that protects the connection after the handshake. `None` at [`Level::Auth`].
    pub fn take_layer(&mut self) -> Option<Layer> {
        self.layer.take()
    }

    /// How many bytes may be read now. 0 when the handshake is over.
    pub fn wanted(&self) -> usize {
        let whole = match self.stage {
            Stage::Greeting => Hello::BYTES,
            // TLS keeps bytes that come after its part.
            Stage::Tls { .. } | Stage::Proof { .. } if self.tls.is_some() => return Hello::BYTES,
            Stage::Tls { .. } | Stage::Proof { .. } => PROOF_BYTES,
            Stage::Done(_) | Stage::Refused => return 0,
        };
        whole - self.input.len()
    }

    /// Takes bytes that have arrived, in pieces of any size. Returns how many it took: all of them, unless
    /// the handshake ends before.
    ///
    /// # Errors
    ///
    /// What is wrong with the other end. The handshake is over then and wants no more bytes. Its last bytes
    /// for the other end are in [`Handshake::output`].
    pub fn receive(&mut self, bytes: &[u8]) -> Result<usize, Refusal> {
        let mut used = 0;
        while used < bytes.len() && self.wanted() > 0 {
            let taken = self.wanted().min(bytes.len() - used);
            let mut piece = &bytes[used..used + taken];
            used += taken;
            match &mut self.tls {
                None => self.input.extend_from_slice(piece),
                Some(tls) => {
                    while !piece.is_empty() {
                        tls.pull(&mut piece).map_err(|error| Refusal::Tls(error.to_string()))?;
                    }
                }
            }
            self.proceed().inspect_err(|_| self.stage = Stage::Refused)?;
        }
        Ok(used)
    }

    /// The bytes that must be written.
    pub fn output(&self) -> &[u8] {
        &self.output
    }

    /// Notes that this many bytes of [`Handshake::output`] are written.
    pub fn wrote(&mut self, bytes: usize) {
        self.output.drain(..bytes.min(self.output.len()));
    }

    /// Takes all of [`Handshake::output`].
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Whether both ends have proven themselves and all is written.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done(_)) && self.output.is_empty()
    }

    /// The other end's greeting, once it has proven itself.
    pub fn peer(&self) -> Option<&Hello> {
        match &self.stage {
            Stage::Done(hello) => Some(hello),
            _ => None,
        }
    }

    fn proceed(&mut self) -> Result<(), Refusal> {
        if let Stage::Greeting = self.stage {
            self.check_front()?;
        }
        if self.tls.is_some() {
            return self.proceed_in_tls();
        }
        if self.wanted() > 0 {
            return Ok(());
        }
        self.step()
    }

    /// Handles a complete greeting or proof.
    fn step(&mut self) -> Result<(), Refusal> {
        let input = std::mem::take(&mut self.input);
        let stage = std::mem::replace(&mut self.stage, Stage::Refused);
        self.stage = match stage {
            Stage::Greeting => self.greeted(&input)?,
            Stage::Proof { theirs, transcript } => self.proven(theirs, &transcript, &input)?,
            over => over,
        };
        Ok(())
    }

    fn proceed_in_tls(&mut self) -> Result<(), Refusal> {
        let stepped = self.step_in_tls();
        // This also sends an alert.
        if let Some(tls) = &mut self.tls {
            tls.push(&mut self.output).map_err(|error| Refusal::Tls(error.to_string()))?;
        }
        stepped
    }

    fn step_in_tls(&mut self) -> Result<(), Refusal> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        let failed = |error: io::Error| Refusal::Tls(error.to_string());
        tls.open(&mut []).map_err(failed)?;
        if tls.is_handshaking() {
            return Ok(());
        }
        if let Stage::Tls { theirs, transcript } = &self.stage {
            let binding = tls.binding().map_err(failed)?;
            let (theirs, transcript) = (*theirs, [&transcript[..], &binding].concat());
            if self.role == Role::Caller {
                self.say(&self.proof(Role::Caller, &transcript))?;
            }
            self.stage = Stage::Proof { theirs, transcript };
        }
        let mut proof = [0; PROOF_BYTES];
        while let Some(tls) = &mut self.tls {
            let left = PROOF_BYTES - self.input.len();
            match tls.open(&mut proof[..left]).map_err(failed)? {
                None => break,
                Some(0) => return Err(Refusal::Tls("it ended before it had proven itself".into())),
                Some(count) => self.input.extend_from_slice(&proof[..count]),
            }
            if self.input.len() == PROOF_BYTES {
                return self.step();
            }
        }
        Ok(())
    }

    fn say(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        match &mut self.tls {
            None => self.output.extend_from_slice(bytes),
            Some(tls) => tls.seal(bytes).map_err(|error| Refusal::Tls(error.to_string()))?,
        }
        Ok(())
    }

    /// Checks the first bytes of a greeting. A stranger is dropped at its first wrong byte. An end of another
    /// release first gets our greeting, which has our version.
    fn check_front(&mut self) -> Result<(), Refusal> {
        Hello::check_front(&self.input).inspect_err(|refusal| {
            if let (Refusal::Version { .. }, Role::Answerer) = (refusal, self.role) {
                self.output = self.greeting().to_vec();
            }
        })
    }

    fn greeted(&mut self, input: &[u8]) -> Result<Stage, Refusal> {
        let Ok(greeting) = <&[u8; Hello::BYTES]>::try_from(input) else {
            unreachable!("a greeting is complete before it is looked at");
        };
        let decoded = Hello::decode(greeting);
        if self.role == Role::Answerer {
            if let Ok((theirs, _)) = &decoded
                && (theirs.channel == Channel::Store) == (self.ours.channel == Channel::Store)
            {
                self.ours.channel = theirs.channel;
            }
            // The greeting is sent even if the caller is refused, so that the caller can tell what is wrong.
            self.output = self.greeting().to_vec();
        }
        let (theirs, level) = decoded?;
        match (&self.secret, level) {
            (None, Some(_)) => return Err(Refusal::OnlyTheyHaveASecret),
            (Some(_), None) => return Err(Refusal::OnlyWeHaveASecret),
            (None, None) if self.level != Level::Auth => {
                return Err(Refusal::LevelWithoutSecret(self.level));
            }
            (Some(_), Some(theirs)) if theirs != self.level => {
                return Err(Refusal::OtherLevel { theirs, ours: self.level });
            }
            _ => {}
        }
        if theirs.channel != self.ours.channel {
            return Err(Refusal::UnwantedChannel(theirs.channel));
        }
        self.expected.check(&theirs)?;
        if self.secret.is_none() {
            return Ok(Stage::Done(theirs));
        }
        let ours = self.greeting();
        let transcript = match self.role {
            Role::Caller => [&ours[..], input].concat(),
            Role::Answerer => [input, &ours[..]].concat(),
        };
        if self.level == Level::Tls {
            let tls = match self.role {
                Role::Caller => secured::caller(),
                Role::Answerer => secured::answerer(),
            };
            let mut tls = tls.map_err(|error| Refusal::Tls(error.to_string()))?;
            tls.push(&mut self.output).map_err(|error| Refusal::Tls(error.to_string()))?;
            self.tls = Some(tls);
            return Ok(Stage::Tls { theirs, transcript });
        }
        if self.role == Role::Caller {
            self.say(&self.proof(Role::Caller, &transcript))?;
        }
        Ok(Stage::Proof { theirs, transcript })
    }

    fn proven(&mut self, theirs: Hello, transcript: &[u8], proof: &[u8]) -> Result<Stage, Refusal> {
        let is_right = self.signed(self.role.other(), transcript).is_some_and(|mac| {
            // Compares in constant time.
            proof.try_into().is_ok_and(|proof| mac.finalize_verify(proof))
        });
        if self.role == Role::Answerer {
            let answer = if is_right { self.proof(Role::Answerer, transcript) } else { NO_PROOF };
            self.say(&answer)?;
        }
        if !is_right {
            return Err(Refusal::WrongSecret);
        }
        if let Some(mut tls) = self.tls.take() {
            tls.push(&mut self.output).map_err(|error| Refusal::Tls(error.to_string()))?;
            self.layer = Some(Layer::new(tls, self.ours.channel == Channel::Control));
        }
        Ok(Stage::Done(theirs))
    }

    fn greeting(&self) -> [u8; Hello::BYTES] {
        self.ours.encode(self.secret.as_ref().map(|_| self.level), &self.nonce)
    }

    fn proof(&self, role: Role, transcript: &[u8]) -> [u8; PROOF_BYTES] {
        self.signed(role, transcript).map_or(NO_PROOF, HMAC::finalize)
    }

    /// The text that an end in this role signs. Its parts have fixed lengths, so two different exchanges
    /// never give the same text.
    fn signed(&self, role: Role, transcript: &[u8]) -> Option<HMAC> {
        let label: &[u8; 27] = match role {
            Role::Caller => b"drumline handshake 2 caller",
            Role::Answerer => b"drumline handshake 2 answer",
        };
        Some(self.secret.as_ref()?.mac(&[label, transcript]))
    }
}

impl Expected {
    /// What a store's client and server expect of each other.
    pub const STORE: Expected = Expected { ranks: 0..1, world_size: 1, group: 0 };

    fn check(&self, hello: &Hello) -> Result<(), Refusal> {
        if hello.group != self.group {
            return Err(Refusal::OtherGroup);
        }
        if hello.world_size != self.world_size {
            let (theirs, ours) = (hello.world_size, self.world_size);
            return Err(Refusal::OtherWorldSize { theirs, ours });
        }
        if !self.ranks.contains(&hello.rank) {
            return Err(Refusal::OtherRank(hello.rank));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes on the bytes that two ends have for each other now.
    fn pass(end: &mut Handshake, middle: &mut Tls) -> Result<(), Refusal> {
        loop {
            let (said, mut heard) = (end.take_output(), Vec::new());
            let mut rest = &said[..];
            while !rest.is_empty() {
                middle.pull(&mut rest).unwrap();
            }
            middle.push(&mut heard).unwrap();
            if said.is_empty() && heard.is_empty() {
                return Ok(());
            }
            end.receive(&heard)?;
        }
    }

    /// A stranger that knows no secret has a TLS connection to each end, and passes on the greetings and
    /// proofs of the two ends.
    #[test]
    fn two_tls_connections_with_somebody_between_prove_nothing() {
        let secret = Some(Secret::new("the secret of this job").unwrap());
        let nonce = || Nonce::random().unwrap();
        let (store, of_store) = (Hello::STORE, Expected::STORE);
        let mut caller =
            Handshake::call(store, of_store.clone(), secret.clone(), nonce()).at(Level::Tls);
        let mut answerer = Handshake::answer(store, of_store, secret, nonce()).at(Level::Tls);
        answerer.receive(&caller.take_output()).unwrap();
        caller.receive(&answerer.take_output()).unwrap();
        let mut to_caller = secured::answerer().unwrap();
        let mut to_answerer = secured::caller().unwrap();
        pass(&mut caller, &mut to_caller).unwrap();
        pass(&mut answerer, &mut to_answerer).unwrap();
        let mut proof = [0; PROOF_BYTES];
        assert_eq!(to_caller.open(&mut proof).unwrap(), Some(PROOF_BYTES));
        assert_ne!(to_caller.binding().unwrap(), to_answerer.binding().unwrap());
        to_answerer.seal(&proof).unwrap();
        let refused = pass(&mut answerer, &mut to_answerer);
        assert_eq!(refused, Err(Refusal::WrongSecret));
        assert_eq!(answerer.peer(), None);
    }
}
