//! Memory that copies are under way to or from.

use std::fmt;
use std::mem::{forget, take};
use std::sync::Arc;

use crate::{Event, Result};

/// Memory that copy engines use until their events have come. Only then can it be had. A drop waits for that.
///
/// If the device fails before, the memory is leaked: nobody can say what its engines still do.
pub struct Flight<T> {
    /// `None` once it has landed.
    held: Option<T>,
    /// What comes when a copy has ended, and what must live until then.
    under_way: Vec<(Arc<dyn Event>, Box<dyn Send + Sync>)>,
}

impl<T> From<T> for Flight<T> {
    /// Nothing is under way.
    fn from(held: T) -> Flight<T> {
        Flight { held: Some(held), under_way: Vec::new() }
    }
}

impl<T> Flight<T> {
    /// From now on a copy uses the memory that ends with `event`, and needs `kept`, too. For drivers.
    #[must_use]
    pub fn until(mut self, event: Arc<dyn Event>, kept: impl Send + Sync + 'static) -> Flight<T> {
        self.under_way.push((event, Box::new(kept)));
        self
    }

    /// Whether all copies have ended. Does not wait.
    ///
    /// # Errors
    ///
    /// Why the device has failed.
    pub fn has_landed(&mut self) -> Result<bool> {
        while let Some((event, _)) = self.under_way.first() {
            if !event.has_come()? {
                return Ok(false);
            }
            self.under_way.remove(0);
        }
        Ok(true)
    }

    /// Waits until all copies have ended: nothing uses the memory now.
    ///
    /// # Errors
    ///
    /// Why the device has failed.
    pub fn settled(&mut self) -> Result<&mut T> {
        self.wait()?;
        match &mut self.held {
            Some(held) => Ok(held),
            None => unreachable!("a flight that has landed is gone"),
        }
    }

    /// Waits until all copies have ended, and gives the memory back.
    ///
    /// # Errors
    ///
    /// Why the device has failed.
    pub fn land(mut self) -> Result<T> {
        self.wait()?;
        match self.held.take() {
            Some(held) => Ok(held),
            None => unreachable!("a flight lands once"),
        }
    }

    /// The memory. For drivers, which need its address: bytes that copies use must not be read or changed.
    pub fn held(&self) -> &T {
        match &self.held {
            Some(held) => held,
            None => unreachable!("a flight that has landed is gone"),
        }
    }

    fn wait(&mut self) -> Result<()> {
        for (event, _) in &self.under_way {
            event.wait()?;
        }
        self.under_way.clear();
        Ok(())
    }
}

impl<T> Drop for Flight<T> {
    fn drop(&mut self) {
        if self.wait().is_err() {
            forget(self.held.take());
            forget(take(&mut self.under_way));
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Flight<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flight")
            .field("held", &self.held)
            .field("under_way", &self.under_way.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::Error;

    #[derive(Debug)]
    struct Switch(AtomicBool);

    impl Event for Switch {
        fn has_come(&self) -> Result<bool> {
            Ok(self.0.load(Ordering::Relaxed))
        }

        /// As of a device that has failed.
        fn wait(&self) -> Result<()> {
            match self.0.load(Ordering::Relaxed) {
                true => Ok(()),
                false => Err(Error::Argument { problem: "it has failed".to_owned() }),
            }
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn switch(has_come: bool) -> Arc<Switch> {
        Arc::new(Switch(AtomicBool::new(has_come)))
    }

    #[test]
    fn memory_comes_back_after_its_last_copy() {
        let (first, second) = (switch(true), switch(false));
        let mut flight = Flight::from(vec![1]).until(first, ()).until(second.clone(), ());
        assert!(!flight.has_landed().unwrap());
        assert!(flight.settled().is_err());
        second.0.store(true, Ordering::Relaxed);
        flight.settled().unwrap()[0] = 2;
        assert!(flight.has_landed().unwrap());
        assert_eq!(flight.land().unwrap(), [2]);
    }

    #[test]
    fn memory_of_a_device_that_has_failed_is_not_freed() {
        let memory = Arc::new(());
        let kept = Arc::new(());
        drop(Flight::from(memory.clone()).until(switch(false), kept.clone()));
        assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&kept)), (2, 2));
        assert!(Flight::from(memory.clone()).until(switch(false), ()).land().is_err());
        assert_eq!(Arc::strong_count(&memory), 3);
        drop(Flight::from(memory.clone()).until(switch(true), ()));
        assert_eq!(Arc::strong_count(&memory), 3);
    }
}
