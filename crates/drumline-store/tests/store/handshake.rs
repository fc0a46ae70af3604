//! The handshake under everything that a stranger may try. No sockets: bytes in, bytes out.

use drumline_store::auth::{Channel, Expected, Handshake, Hello, Nonce, Refusal, Secret};
use proptest::prelude::*;

const PROOF_BYTES: usize = 32;

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text).unwrap())
}

fn ours() -> Option<Secret> {
    secret("the secret of this job")
}

fn hello(rank: usize) -> Hello {
    Hello { channel: Channel::Data(0), rank, world_size: 2, group: 7 }
}

fn expected(rank: usize) -> Expected {
    Expected { ranks: rank..rank + 1, world_size: 2, group: 7 }
}

fn nonce() -> Nonce {
    Nonce::random().unwrap()
}

fn caller(secret: Option<Secret>) -> Handshake {
    Handshake::call(hello(1), expected(0), secret, nonce())
}

fn answerer(secret: Option<Secret>) -> Handshake {
    Handshake::answer(hello(0), expected(1), secret, nonce())
}

/// What became of an end: who it met, or why it refused; neither while it waits.
#[derive(Debug, Default, PartialEq)]
struct End {
    met: Option<Hello>,
    refused: Option<Refusal>,
}

/// Lets two ends talk until they fall silent. `wire` may change every message; its first argument tells
/// whether the caller sent that message. Bytes arrive `piece` at a time.
fn talk(
    caller: &mut Handshake,
    answerer: &mut Handshake,
    piece: usize,
    mut wire: impl FnMut(bool, &mut Vec<u8>),
) -> [End; 2] {
    let mut ends = [End::default(), End::default()];
    loop {
        let mut moved = false;
        for by_caller in [true, false] {
            let (from, to) = match by_caller {
                true => (&mut *caller, &mut *answerer),
                false => (&mut *answerer, &mut *caller),
            };
            let mut bytes = from.take_output();
            if bytes.is_empty() {
                continue;
            }
            moved = true;
            wire(by_caller, &mut bytes);
            for piece in bytes.chunks(piece) {
                if let Err(refusal) = to.receive(piece) {
                    ends[usize::from(by_caller)].refused = Some(refusal);
                }
            }
        }
        if !moved {
            break;
        }
    }
    ends[0].met = caller.peer().copied();
    ends[1].met = answerer.peer().copied();
    ends
}

fn untouched(_: bool, _: &mut Vec<u8>) {}

#[test]
fn two_ends_of_one_job_meet_however_their_bytes_arrive() {
    for secret in [None, ours()] {
        for piece in [1, 2, 7, 31, 1000] {
            let (mut a, mut b) = (caller(secret.clone()), answerer(secret.clone()));
            let [caller, answerer] = talk(&mut a, &mut b, piece, untouched);
            assert_eq!((caller.met, answerer.met), (Some(hello(0)), Some(hello(1))));
            assert!(a.is_done() && b.is_done());
            assert_eq!((a.wanted(), b.wanted()), (0, 0));
        }
    }
}

#[test]
fn every_channel_is_answered_as_itself_and_the_store_only_by_a_store() {
    for channel in [Channel::Control, Channel::Data(0), Channel::Data(7), Channel::Points] {
        let hello = Hello { channel, ..hello(1) };
        let mut a = Handshake::call(hello, expected(0), ours(), nonce());
        let [caller, answerer] = talk(&mut a, &mut answerer(ours()), 9, untouched);
        assert_eq!(caller.met.unwrap().channel, channel);
        assert_eq!(answerer.met, Some(hello));
    }
    let store = || Handshake::answer(Hello::STORE, Expected::STORE, ours(), nonce());
    let mut client = Handshake::call(Hello::STORE, Expected::STORE, ours(), nonce());
    let [to_store, _] = talk(&mut client, &mut store(), 9, untouched);
    assert_eq!(to_store.met, Some(Hello::STORE));
    let [_, at_store] = talk(&mut caller(ours()), &mut store(), 9, untouched);
    assert_eq!(at_store.refused, Some(Refusal::UnwantedChannel(Channel::Data(0))));
}

#[test]
fn what_follows_the_handshake_is_left_alone() {
    let (mut a, mut b) = (caller(ours()), answerer(ours()));
    b.receive(&a.take_output()).unwrap();
    a.receive(&b.take_output()).unwrap();
    let proof_and_data = [a.take_output(), b"data".to_vec()].concat();
    assert_eq!(b.receive(&proof_and_data), Ok(PROOF_BYTES));
    assert_eq!(b.receive(b"data"), Ok(0));
}

#[test]
fn a_single_flipped_bit_anywhere_is_refused() {
    // The four messages: two greetings, two proofs.
    let messages = [(true, Hello::BYTES), (false, Hello::BYTES), (true, 32), (false, 32)];
    for (number, (by_caller, length)) in messages.into_iter().enumerate() {
        for bit in 0..length * 8 {
            let mut seen = [0, 0];
            let ends = talk(&mut caller(ours()), &mut answerer(ours()), 1000, |sender, bytes| {
                let nth = seen[usize::from(sender)];
                seen[usize::from(sender)] += 1;
                if sender == by_caller && nth == number / 2 {
                    assert_eq!(bytes.len(), length);
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            });
            let receiver = &ends[usize::from(by_caller)];
            assert_eq!(receiver.met, None, "bit {bit} of message {number}");
            // Only who sends the last message cannot know that it arrived spoiled.
            assert!(number == 3 || ends.iter().all(|end| end.met.is_none()), "{number}: {ends:?}");
            assert!(receiver.refused.is_some() || number < 2);
        }
    }
}

#[test]
fn another_secret_is_named_at_both_ends() {
    let other = secret("the secret of another job");
    let ends = talk(&mut caller(ours()), &mut answerer(other), 1000, untouched);
    for end in ends {
        assert_eq!(end, End { met: None, refused: Some(Refusal::WrongSecret) });
    }
    assert!(Refusal::WrongSecret.to_string().contains("DRUMLINE_SECRET_FILE"));
}

#[test]
fn a_secret_on_one_side_only_is_named_at_both_ends() {
    let [caller_end, answerer_end] =
        talk(&mut caller(ours()), &mut answerer(None), 1000, untouched);
    assert_eq!(caller_end.refused, Some(Refusal::OnlyWeHaveASecret));
    assert_eq!(answerer_end.refused, Some(Refusal::OnlyTheyHaveASecret));
    let [caller_end, answerer_end] =
        talk(&mut caller(None), &mut answerer(ours()), 1000, untouched);
    assert_eq!(caller_end.refused, Some(Refusal::OnlyTheyHaveASecret));
    assert_eq!(answerer_end.refused, Some(Refusal::OnlyWeHaveASecret));
    assert!(caller_end.met.is_none() && answerer_end.met.is_none());
}

#[test]
fn who_does_not_belong_to_the_group_is_told_why() {
    for (odd, refusal) in [
        (Hello { group: 8, ..hello(1) }, Refusal::OtherGroup),
        (Hello { world_size: 3, ..hello(1) }, Refusal::OtherWorldSize { theirs: 3, ours: 2 }),
        (Hello { rank: 0, ..hello(1) }, Refusal::OtherRank(0)),
        (Hello { rank: u32::MAX as usize, ..hello(1) }, Refusal::OtherRank(u32::MAX as usize)),
    ] {
        let mut odd = Handshake::call(odd, expected(0), ours(), nonce());
        let [_, answerer] = talk(&mut odd, &mut answerer(ours()), 1000, untouched);
        assert_eq!(answerer, End { met: None, refused: Some(refusal) });
    }
}

#[test]
fn another_release_gets_our_version_in_return() {
    let mut b = answerer(ours());
    // The first six bytes of the greeting of version 1.
    assert!(matches!(b.receive(b"DRUM\x01\0"), Err(Refusal::Version { theirs: 1, ours: 3 })));
    assert_eq!(b.take_output()[..6], *b"DRUM\x03\0");
}

/// Everybody would do as a peer here, so that nothing but the proof can refuse.
fn trusting(role: fn(Hello, Expected, Option<Secret>, Nonce) -> Handshake) -> Handshake {
    role(hello(1), Expected { ranks: 0..2, ..expected(0) }, ours(), nonce())
}

#[test]
fn our_own_words_are_no_proof() {
    // Mirrored to the caller itself.
    let mut a = trusting(Handshake::call);
    let greeting = a.take_output();
    a.receive(&greeting).unwrap();
    let proof = a.take_output();
    assert_eq!(proof.len(), PROOF_BYTES);
    assert_eq!(a.receive(&proof), Err(Refusal::WrongSecret));

    // Two callers that a stranger joins with each other.
    let (mut a, mut b) = (trusting(Handshake::call), trusting(Handshake::call));
    let (hello_a, hello_b) = (a.take_output(), b.take_output());
    a.receive(&hello_b).unwrap();
    b.receive(&hello_a).unwrap();
    let (proof_a, proof_b) = (a.take_output(), b.take_output());
    assert_eq!(a.receive(&proof_b), Err(Refusal::WrongSecret));
    assert_eq!(b.receive(&proof_a), Err(Refusal::WrongSecret));
}

#[test]
fn a_stranger_cannot_let_the_answerer_sign_for_it() {
    // Without the secret, it opens two connections and shows on one what it hears on the other.
    let mut target = trusting(Handshake::answer);
    let mut oracle = trusting(Handshake::answer);
    let greeting = trusting(Handshake::call).take_output();
    target.receive(&greeting).unwrap();
    oracle.receive(&greeting).unwrap();
    let from_target = target.take_output();
    assert_eq!(from_target.len(), Hello::BYTES, "nothing is signed before the stranger has proven");
    // The proof that it needs would be the caller's; all that it can get is a refusal.
    assert_eq!(oracle.receive(&[1; PROOF_BYTES]), Err(Refusal::WrongSecret));
    let heard = oracle.take_output();
    assert_eq!(heard[heard.len() - PROOF_BYTES..], [0; PROOF_BYTES]);
    assert_eq!(target.receive(&[0; PROOF_BYTES]), Err(Refusal::WrongSecret));
}

#[test]
fn what_was_heard_before_is_no_proof() {
    let mut said = [Vec::new(), Vec::new()];
    talk(&mut caller(ours()), &mut answerer(ours()), 1000, |by_caller, bytes| {
        said[usize::from(by_caller)].extend_from_slice(bytes);
    });
    let [by_answerer, by_caller] = said;
    assert_eq!(answerer(ours()).receive(&by_caller), Err(Refusal::WrongSecret));
    assert_eq!(caller(ours()).receive(&by_answerer), Err(Refusal::WrongSecret));
}

#[test]
fn fresh_nonces_differ() {
    assert_ne!(nonce(), nonce());
}

proptest! {
    /// A correct beginning and then anything: no panic, no admission, bounded memory.
    #[test]
    fn garbage_from_any_byte_on_is_refused(
        correct in 0..Hello::BYTES + PROOF_BYTES,
        garbage in prop::collection::vec(any::<u8>(), 1..200),
        piece in 1..100_usize,
        secret in prop::sample::select(vec![None, ours()]),
        is_answerer in any::<bool>(),
    ) {
        let mut said = [Vec::new(), Vec::new()];
        let (mut a, mut b) = (caller(secret.clone()), answerer(secret.clone()));
        talk(&mut a, &mut b, 1000, |by_caller, bytes| {
            said[usize::from(by_caller)].extend_from_slice(bytes);
        });
        let good = &said[usize::from(is_answerer)];
        prop_assume!(correct < good.len());
        let spoiled = [&good[..correct], &garbage[..]].concat();
        prop_assume!(!spoiled.starts_with(good));

        let mut end = if is_answerer { answerer(secret.clone()) } else { caller(secret.clone()) };
        let mut refused = false;
        for piece in spoiled.chunks(piece) {
            let before = end.wanted();
            prop_assert!(before <= Hello::BYTES);
            match end.receive(piece) {
                Ok(_) => prop_assert!(!refused || end.wanted() == 0),
                Err(_) => refused = true,
            }
        }
        // Without a secret nothing is proven, and a changed nonce goes unnoticed.
        if secret.is_some() {
            prop_assert_eq!(end.peer(), None);
        }
    }
}
