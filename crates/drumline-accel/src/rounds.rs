//! Rounds of words on the process group, beside the calls of devices. Each ends in the inbox.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drumline_group::driving;

use crate::Error;
use crate::direct::describe;
use crate::inbox::Shared;

/// Compares the lengths of a call on all ranks. The host compares those of single windows: ranks whose lengths differ by
/// whole windows would go on with parts of different calls.
pub(crate) fn agree_on_length(shared: &Arc<Shared>, elements: u64) {
    let told = shared.clone();
    driving::all_gather_then(&shared.group, vec![elements], move |heard| {
        let agreed = heard.map_err(Error::from).and_then(|all| {
            match all.iter().position(|theirs| *theirs != elements) {
                None => Ok(()),
                Some(peer) => Err(Error::Differs {
                    operation: "all_reduce",
                    peer,
                    theirs: format!("{} elements", all[peer]),
                    ours: format!("{elements} elements"),
                }),
            }
        });
        told.tell(|inbox| inbox.agreed.push(agreed));
    });
}

/// Compares a call on all ranks. The flag is set when all make the same one.
pub(crate) fn agree_on_call(shared: &Arc<Shared>, words: &[u64]) -> Arc<AtomicBool> {
    let agreed = Arc::new(AtomicBool::new(false));
    let (told, flag, own) = (shared.clone(), agreed.clone(), words.to_vec());
    driving::all_gather_then(&shared.group, words.to_vec(), move |heard| {
        let result = heard.map_err(Error::from).and_then(|all| {
            match all.chunks_exact(own.len()).enumerate().find(|(_, theirs)| *theirs != own) {
                None => {
                    flag.store(true, Ordering::Release);
                    Ok(())
                }
                Some((peer, theirs)) => Err(Error::Differs {
                    operation: "nccl",
                    peer,
                    theirs: describe(theirs),
                    ours: describe(&own),
                }),
            }
        });
        told.tell(|inbox| inbox.agreed.push(result));
    });
    agreed
}

/// A call on the process group that ends only when all ranks answer: after a hint that one is lost, it says which.
pub(crate) fn ask_all(shared: &Arc<Shared>) {
    let told = shared.clone();
    driving::all_gather_then(&shared.group, vec![u64::MAX], move |heard| {
        let result = heard.map(drop).map_err(Error::from);
        told.tell(|inbox| inbox.agreed.push(result));
    });
}
