//! The corpus, and a short random run, on every decoder: alone in its process, which counts memory.

use drumline_fuzz::{
    DECODERS, Verdict, check, corpus,
    random::{Inputs, attempt},
};

/// Random inputs of each decoder: two seconds or three in all.
const INPUTS: usize = 4000;

#[test]
fn every_decoder_keeps_its_promises() {
    for decoder in DECODERS {
        let files = corpus::read(decoder).unwrap();
        let recorded = files.iter().filter(|(name, _)| name.starts_with(corpus::RECORDED));
        assert!(recorded.clone().count() > 0, "{} has no recording", decoder.name);
        for (name, bytes) in &files {
            println!("{}/{name}", decoder.name);
            let verdict = check(decoder, bytes);
            let is_recorded = name.starts_with(corpus::RECORDED);
            assert!(!is_recorded || verdict == Verdict::Taken, "{}/{name}", decoder.name);
        }
        let mut inputs = Inputs::new(decoder, 1).unwrap();
        let mut refused = 0;
        for _ in 0..INPUTS {
            let input = inputs.next_input();
            match attempt(decoder, &input) {
                Ok(Verdict::Taken) => inputs.taken(input),
                Ok(Verdict::Refused) => refused += 1,
                Err(text) => {
                    let path = corpus::keep(decoder, &input).unwrap();
                    panic!("{}: {text}\n    {}", decoder.name, path.display());
                }
            }
        }
        assert!(refused > 0, "{} takes everything", decoder.name);
    }
}
